"""Recorded runs of the simulation: real actors, faults of every kind, virtual time.

Owns: how a recorder gets into a simulated engine.  Does not know: what is done with its files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from engine.config import Config, build_config
from engine.features.recording import state
from engine.features.recording.file import Recording, read_recording
from engine.features.recording.recorder import RecordedScheduler, Recorder
from engine.plugins.blueprint import Blueprint
from engine.plugins.manager import Plugins
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.rows import PlannerLimits
from server.extensions.chaos.sim import assembly, probe
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.scenario import Scenario
from server.extensions.chaos.sim.world import World

BUILD = probe.build_planner
NO_LIMIT = 1 << 30


class SimBlueprint(Blueprint, frozen=True):
    """Builds what the simulation builds, strange proposers among it."""

    setup: Any = None

    def policy(self, plugins: Plugins) -> SchedulingPolicy:
        return probe.POLICIES[self.setup.policy](self.setup.max_overtaken)

    def planner(
        self, plugins: Plugins, limits: PlannerLimits, clock: Any, policy: SchedulingPolicy, watchers: Any = ()
    ) -> Planner:
        before: Any = SimpleNamespace(_policy=policy)
        return BUILD(replace(self.setup, record_events=False), limits.num_pages, clock, before)


def blueprint_of(scenario: Scenario, proposer: str = "") -> Blueprint:
    """The simulation's own planner; with a proposer, one of the plugins that are named."""
    setup = scenario.setup
    limits = PlannerLimits(
        max_running=setup.max_running, max_step_tokens=setup.max_step_tokens, prefill_chunk=setup.prefill_chunk,
        page_size=setup.page_size, num_pages=setup.num_pages, max_len=setup.max_len, eos_token_ids=setup.eos_token_ids,
        num_host_pages=setup.num_host_pages, itl_target_s=setup.itl_target_s,
    )  # fmt: skip
    names = {"eviction": f"eviction.{setup.eviction}", "policy": f"policy.{setup.policy}"}
    config = build_config(
        Config(),
        {
            "kv": {
                "page_size": setup.page_size,
                "num_host_pages": setup.num_host_pages,
                "store_timeout_s": setup.store_timeout_s or 1.0,
            },
            "lora": {"folder": "/adapters", "max_adapters": setup.num_slots},
            "plugins": {"kv_store": "files" if setup.store_timeout_s else "none"},
        },
    )
    if proposer:
        names["proposer"] = f"proposer.{proposer}"
        return Blueprint(limits, setup.overlap, VOCAB, setup.max_len, names, config)
    return SimBlueprint(limits, setup.overlap, VOCAB, setup.max_len, names, config, setup=setup)


@contextmanager
def strange_plugins() -> Iterator[None]:
    """The simulation's proposers may come back from a state."""
    with mock.patch.object(
        state, "MODULES", (*state.MODULES, "tests", "server.extensions.chaos.sim", "engine.plugins")
    ):
        yield


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over."""

    world: World
    recorder: Recorder
    blueprint: Blueprint
    folder: Path

    def recording(self, name: str = "run.cbr") -> Recording:
        """What the recorder has, written and read again."""
        self.recorder.write("test", name)
        assert self.recorder._writing is not None
        self.recorder._writing.join()
        recording = read_recording(self.folder / name)
        blueprint = msgspec.structs.replace(self.blueprint, limits=recording.header.blueprint.limits)
        return replace(recording, header=msgspec.structs.replace(recording.header, blueprint=blueprint))


def recorded_run(
    scenario: Scenario, folder: Path, *, limit_bytes: int = NO_LIMIT, prompts: str = "whole", proposer: str = ""
) -> Run:
    """A run with a recorder, which writes nothing that nobody asks for.  proposer: a plugin; '' for the setup's."""
    blueprint = blueprint_of(scenario, proposer)
    plugins = blueprint.plugins()
    policy = blueprint.policy(plugins)
    recorder = Recorder(blueprint, plugins, folder=folder, limit_bytes=limit_bytes, prompts=prompts, waited_s=1e9)
    recorder.alert = lambda why: None  # type: ignore[method-assign]
    recorder.write_at_last = lambda why: None  # type: ignore[method-assign]

    def build(setup: Any, num_pages: int, clock: Any, before: Planner | None) -> Planner:
        recorder.now = clock
        return blueprint.planner(plugins, replace(blueprint.limits, num_pages=num_pages), recorder.clock, policy)

    scheduler = partial(RecordedScheduler, recorder=recorder)
    with mock.patch.object(assembly, "Scheduler", scheduler), mock.patch.object(probe, "build_planner", build):
        world = World(scenario)
        world.run()
    return Run(world, recorder, blueprint, folder)
