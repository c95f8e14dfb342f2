"""The changeover: an engine goes from one configuration to another while requests run, sleeps, and wakes up.

Owns: the order of these, and that they happen one at a time.
Does not know: what differs (``changes.py``), how executors are replaced, where a change comes from, HTTP.
A new configuration is checked whole before anything changes, and takes effect whole or not at all.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import msgspec

from engine.actors.operations import SettingsChanged
from engine.config import Config
from engine.control.changes import (
    Change,
    changes,
    refuse_fixed,
    refuse_more_requests,
    refuse_other_text,
    refuse_places,
)
from engine.control.engine_spec import EngineSpec, engine_spec
from engine.host.device_defaults import gpu_bytes, torch_may_use_gpus
from engine.host.memory import available_bytes, release_freed
from engine.plugins.features import check_successor
from engine.plugins.kinds import KINDS, chosen_plugins
from engine.types.errors import ConfigError
from engine.types.notices import Reconfigure

if TYPE_CHECKING:
    from engine.control.system import System

log = logging.getLogger(__name__)

BYTES_PER_PARAMETER = 4  # at most, in host memory
MEMORY_SHARE = 0.7  # of the available memory, for a second set of weights; pages and activations take memory as well
TAGS = ("weights", "kv_cache")  # kinds of memory that are given back
Road = Literal["none", "live", "beside", "after"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that a configuration has made, or would make.

    road: 'none' if nothing differs; 'live'; 'beside': new executors load while the old ones serve; 'after': they
    load when the old ones have ended, and requests wait.  applied: False for a dry run.  took_s: seconds in all."""

    changes: tuple[Change, ...]
    road: Road
    applied: bool
    took_s: float = 0.0


class Changeover:
    """The changeovers of one engine, on its event loop.

    describe: returns the data of an engine for its entrance, sent as ``about`` of ``SettingsChanged``.
    is_asleep: the engine takes no requests, and those it has wait for ``wake``."""

    def __init__(self, system: "System", describe: Callable[[EngineSpec], bytes] = lambda engine: b"") -> None:
        self.is_asleep = False
        self._describe = describe
        self._system = system
        self._most_requests = system.config.limits.max_requests
        self._longest = system.max_len  # of requests that ingress admits
        self._lock = asyncio.Lock()

    async def apply(self, config: Config, *, dry_run: bool = False, is_sent: bool = False) -> Outcome:
        """Change to a configuration.  If it raises CallboardError, everything is as it was before.

        is_sent: it came with a request, which may change no place on disk or network: nothing is read there."""
        async with self._lock:
            system, began = self._system, time.monotonic()
            if is_sent:
                refuse_places(system.config, config)
            present, several = system.engine, system.has_several_machines
            new = await asyncio.to_thread(engine_spec, config, system.stages, several_machines=several, present=present)
            found = changes(system.config, new.config)
            refuse_fixed(found)
            refuse_more_requests(self._most_requests, new.config)
            refuse_other_text(present.model, present.directory, new.model, new.directory, self._longest)
            check_successor(present.facts, new.facts, config.model.path)
            by_executors = any(one.changed == "executors" for one in found)
            road: Road = self._road(new) if by_executors else "live" if found else "none"
            if dry_run or not found:
                return Outcome(changes=found, road=road, applied=False)
            # On a thread, since it may read all weights; and first, so that the new model never has the old one's name.
            about = await asyncio.to_thread(self._describe, new)
            if not by_executors:
                self._follow(new, renews=False)
            else:
                await self._replace(new, beside=road == "beside")
            system.entrance.inbox.put(SettingsChanged(limits=system.config.limits, about=about))
            log.info("applied: %s", ", ".join(f"{one.key}={one.after}" for one in found))
            return Outcome(changes=found, road=road, applied=True, took_s=time.monotonic() - began)

    async def _replace(self, new: EngineSpec, *, beside: bool) -> None:
        if self.is_asleep:
            raise ConfigError("the engine sleeps, and this needs new executors: wake it up first (POST /wake_up)")
        system = self._system

        def taking_over(num_pages: int) -> None:
            limits, planner = replace(new.blueprint.limits, num_pages=num_pages), system.scheduler.planner
            most = planner.requests.most_total if planner is not None else 0
            if most > limits.longest:
                raise ConfigError(
                    f"kv.num_pages={num_pages} of {limits.page_size} tokens: an open request may get {most} "
                    "tokens; try again when it has ended, or with more pages"
                )
            self._follow(new, renews=True)

        step_timeout_s = new.config.placement.step_timeout_s
        await system.executors.replace(system.placement(new), step_timeout_s, taking_over, beside=beside)

    def _follow(self, new: EngineSpec, *, renews: bool) -> None:
        self._system.follow(new)
        blueprint = msgspec.msgpack.encode(new.blueprint)
        self._system.scheduler.inbox.put(Reconfigure(blueprint=blueprint, renews=renews))

    def _road(self, new: EngineSpec) -> Road:
        """Return how executors are replaced.  Pools of GPUs take all memory; ranks on other machines have one place."""
        if self._system.has_several_machines or _is_on_gpu(new.config):
            return "after"
        return "beside" if BYTES_PER_PARAMETER * new.num_parameters < MEMORY_SHARE * available_bytes() else "after"

    async def sleep(self, level: Literal[1, 2], tags: tuple[str, ...] = ()) -> None:
        """Stop taking requests and running steps.  Running requests wait where they are, until ``wake``.

        level: 1 keeps executors on CPUs as they are; with 2, and on GPUs, executors end and their memory is free.
        tags: of ``TAGS``; executors give back the memory that these name, and requests wait.  Raises RequestError."""
        async with self._lock:
            if self.is_asleep:
                return
            if tags:
                await self._rest(tags)
                return
            self.is_asleep = True
            config = self._system.config
            moves = any(KINDS[kind].moves_pages for kind in chosen_plugins(config))
            keep = level == 1 and not _is_on_gpu(config) and not moves
            log.info("the engine goes to sleep, and keeps %s", "its executors" if keep else "no executor")
            await self._system.executors.release("the engine sleeps", is_sleep=True, keep=keep)
            if not keep:
                await asyncio.to_thread(release_freed)

    async def wake(self, tags: tuple[str, ...] = ()) -> None:
        """Let executors work again, and requests go on.  Raises the error of loading them, and sleeps on then.

        tags: of ``TAGS``, none for all; requests go on when all memory is there again."""
        async with self._lock:
            left = tuple(one for one in TAGS if tags and one not in tags)
            if self.is_asleep:
                on_gpu = _is_on_gpu(self._system.config)
                rest = asyncio.create_task(self._rest(() if on_gpu else left))  # no step starts before it has ended
                try:
                    await self._system.executors.resume()
                    self.is_asleep = False
                    await rest
                finally:
                    rest.cancel()
            for feature in self._system.features.values():
                await feature.rise(tags or TAGS)
            log.info("the engine is awake%s", f", but for {', '.join(left)}" if left else "")

    async def _rest(self, tags: tuple[str, ...]) -> None:
        for feature in self._system.features.values() if tags else ():
            await feature.rest(tags)


def _is_on_gpu(config: Config) -> bool:
    kind = config.device.kind
    return kind == "cuda" or (kind == "auto" and gpu_bytes() > 0 and torch_may_use_gpus())
