"""Weight updates as a part of an engine: an operator's commands, and what they wait for.

Owns: the numbers of commands, updates that come in pieces.
Does not know: how ranks change their weights, HTTP, where weights come from.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from engine.actors.feature import EngineContext, EngineFeature, NewScheduler
from engine.actors.scheduler import Scheduler
from engine.config import Config
from engine.features.weight_updates.messages import (
    TAGS,
    Announced,
    Command,
    GiveBack,
    Mode,
    Pause,
    Resume,
    Tag,
    TakeBack,
    Update,
    Weights,
    command_message,
)
from engine.features.weight_updates.planner import WeightsPlanner
from engine.features.weight_updates.settings import VersionSettings
from engine.features.weight_updates.sources import MOST_PIECES, Sources, check_announced, sent_place
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import CallboardError, FieldError, RequestError

LOOK_EVERY_S: Final = 0.005  # at whether a command has ended
MAX_VERSION_CHARS: Final = 256


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute with the weights of another checkpoint of the same model.

    directory: of the checkpoint, or a safetensors file with the tensors that differ from the present ones, or memory
    with them.
    version: its name in answers; '' for its number.  digest: expected fingerprint, or SHA-256 of the file; '' for any.
    mode: see ``Mode``; None for that of the pause, or 'retract'.
    max_versions: requests end that would have tokens of more versions; None for the limit that is set, 0 for none.
    is_sent: it came with a request, which may name no place but those that ``sent_place`` allows.
    is_piece: after ``BeginUpdate`` it is kept until ``FinishUpdate``.
    announced: name, dtype and shape of all tensors that the file must have; empty for any."""

    directory: str
    version: str = ""
    digest: str = ""
    mode: Mode | None = None
    max_versions: int | None = None
    is_sent: bool = False
    is_piece: bool = False
    announced: tuple[Announced, ...] = ()


class BeginUpdate(msgspec.Struct, frozen=True, tag=True):
    """Collect the pieces of an update; those of one that was not finished are forgotten."""


class FinishUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change to the weights of all pieces at once.  version: their name in answers; '' for the number."""

    version: str = ""


class PauseRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start no step until ``ResumeRows``.  mode: what happens to running rows."""

    mode: Mode


class ResumeRows(msgspec.Struct, frozen=True, tag=True):
    """Go on after a pause."""


class ReleaseMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start no step, and give memory back, until it is regained."""

    tags: tuple[Tag, ...] = TAGS


class RegainMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take memory again, and go on when nothing is missing."""

    tags: tuple[Tag, ...] = TAGS


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Return the present state."""


Asked = UpdateWeights | BeginUpdate | FinishUpdate | PauseRows | ResumeRows | ReleaseMemory | RegainMemory | Describe


class WeightsState(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a command.

    version, digest: of the present weights.  number: of updates so far.  took_s: seconds, also for reading weights.
    released: memory that is given back.  num_ranks: that compute.  most_bytes: that a file of tensors may have."""

    version: str
    number: int
    digest: str
    paused: bool
    took_s: float = 0.0
    released: tuple[Tag, ...] = ()
    num_ranks: int = 1
    most_bytes: int = 0


class WeightsFeature(EngineFeature):
    """The weights of one engine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._scheduler: Scheduler | None = None
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._sources = Sources()
        self._pieces: list[Path] | None = None  # of an update that has begun

    def scheduler(self, build: NewScheduler) -> NewScheduler:
        """Return a constructor that notes the scheduler, which gets the commands."""
        return partial(self._noted, build)

    def _noted(self, build: Callable[..., Scheduler], **arguments: object) -> Scheduler:
        self._scheduler = build(**arguments)
        return self._scheduler

    def plans(self, limits: PlannerLimits, config: Config) -> None:
        """Note the configuration."""
        self._config = config

    async def operate(self, text: str) -> bytes:
        """Do what an operator asks for, and return the ``WeightsState`` as JSON.  Raises RequestError.

        text: an ``Asked`` as JSON."""
        asked: Asked = msgspec.json.decode(text, type=Asked)
        began = time.monotonic()
        match asked:
            case UpdateWeights() | BeginUpdate() | FinishUpdate():
                async with self._lock:
                    await self._update(asked)
            case PauseRows(mode=mode):
                await self._do(Pause(mode))
            case ResumeRows():
                await self._do(Resume())
            case ReleaseMemory(tags=tags):
                await self._do(GiveBack(tags))
            case RegainMemory(tags=tags):
                await self._do(TakeBack(tags))
            case Describe():
                pass
        return msgspec.json.encode(await self._state(time.monotonic() - began))

    async def _state(self, took_s: float) -> WeightsState:
        planner, sources, config = self._planner, self._sources, self._config
        present = planner.present
        has_files = config.model.load_format == "safetensors"
        return WeightsState(
            version=present.version,
            number=present.number,
            digest=await asyncio.to_thread(sources.digest, present, config) if has_files else "",
            paused=planner.pause is not None,
            took_s=took_s,
            released=tuple(sorted(planner.given_back)),
            num_ranks=planner.num_ranks,
            most_bytes=await asyncio.to_thread(sources.most_bytes, config) if has_files else 0,
        )

    async def rest(self, tags: tuple[str, ...]) -> None:
        await self._do(GiveBack(msgspec.convert(tags, tuple[Tag, ...])))

    async def rise(self, tags: tuple[str, ...]) -> None:
        if self._planner.given_back:
            await self._do(TakeBack(msgspec.convert(tags, tuple[Tag, ...])))

    # ---- updates ----------------------------------------------------------------------------

    async def _update(self, asked: UpdateWeights | BeginUpdate | FinishUpdate) -> None:
        """Change the weights, or take a piece of a change."""
        match asked:
            case BeginUpdate():
                self._pieces = []
                self._sources.keep(self._planner.present)
            case FinishUpdate(version=version):
                if (pieces := self._pieces) is None:
                    raise RequestError("no update has begun; send start_weight_update first", code="no_update")
                self._pieces = None
                if pieces:
                    await self._change(pieces, UpdateWeights(directory="", version=version))
            case UpdateWeights():
                if asked.is_piece and self._pieces is not None and len(self._pieces) == MOST_PIECES:
                    raise RequestError(f"an update has {MOST_PIECES} pieces at most; finish this one")
                path = await asyncio.to_thread(self._placed, asked)
                if asked.announced:
                    await asyncio.to_thread(check_announced, path, asked.announced)
                if not asked.is_piece or self._pieces is None:
                    await self._change([path], asked)
                elif path.is_dir():
                    raise RequestError(f"{path}: a piece of an update is a file of tensors, not a directory")
                else:
                    self._pieces.append(path)

    async def _change(self, paths: list[Path], asked: UpdateWeights) -> None:
        if len(asked.version) > MAX_VERSION_CHARS or not asked.version.isprintable():
            raise FieldError("version", f"expected up to {MAX_VERSION_CHARS} printable characters")
        named = partial(self._sources.weights, version=asked.version, digest=asked.digest)
        most = asked.max_versions
        if most is None:
            most = VersionSettings.of(self._config).max_weight_versions
        try:
            weights: Weights = await asyncio.to_thread(named, paths, self._planner.present, self._config)
            await self._do(Update(weights, asked.mode, most))
        except CallboardError:
            self._forget()
            raise
        self._forget()

    def _forget(self) -> None:
        if self._pieces is None:
            self._sources.keep(self._planner.present)

    def _placed(self, asked: UpdateWeights) -> Path:
        """Return the place of weights.  Raises WeightsError, and FieldError for one that a request may not name."""
        config = self._config
        if asked.is_sent:
            return sent_place(asked.directory, config)
        return self._sources.received(str(Path(asked.directory).absolute()), config)

    def close(self) -> None:
        """Remove what was made of files and memory."""
        self._sources.close()

    async def _do(self, command: Command) -> None:
        """Send a command, and wait until it has ended.  Raises RequestError."""
        number = next(self._numbers)
        planner = self._planner
        assert self._scheduler is not None
        self._scheduler.inbox.put(command_message(number, command))
        while number not in (planner := self._planner).ends:
            if not self._scheduler.inbox.is_open:
                raise RequestError("the engine has ended", status=503, code="engine_failed")
            await asyncio.sleep(LOOK_EVERY_S)  # the planner awaits nothing
        if error := planner.ends[number]:
            raise RequestError(f"{error}; nothing has changed", code="weights_refused")

    @property
    def _planner(self) -> WeightsPlanner:
        planner = self._scheduler.planner if self._scheduler is not None else None
        if planner is None:
            raise RequestError("the engine is loading; try again later", status=503, code="not_ready")
        return next(one for one in planner.features.all if isinstance(one, WeightsPlanner))


def engine_feature(context: EngineContext) -> WeightsFeature:
    """Return the feature."""
    return WeightsFeature(context.config)
