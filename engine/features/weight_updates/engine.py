"""Weight updates as a part of an engine: an operator's commands, and what they wait for.

Owns: the numbers of commands, the check of a checkpoint before any rank reads it.
Does not know: how ranks change their weights, HTTP, which directories a request may name.
"""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from engine.actors.feature import EngineContext, EngineFeature, NewScheduler
from engine.actors.scheduler import Scheduler
from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.fingerprint import fingerprint
from engine.config import Config
from engine.features.weight_updates.files import overlay
from engine.features.weight_updates.messages import (
    Command,
    Mode,
    Pause,
    Resume,
    Update,
    Weights,
    command_message,
)
from engine.features.weight_updates.planner import WeightsPlanner
from engine.plugins.families import read_model
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import FieldError, RequestError

LOOK_EVERY_S: Final = 0.005  # at whether a command has ended
FOLDER: Final = "weights"  # in storage.folder
MAX_VERSION_CHARS: Final = 256


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute with the weights of another checkpoint of the same model.

    directory: of the checkpoint, or a safetensors file with the tensors that differ from the present ones.
    version: its name in answers; '' for its number.  digest: expected fingerprint; '' for any.
    mode: see ``Mode``; None for that of the pause, or 'retract'.
    max_versions: requests end that would have tokens of more versions; 0 for no limit.
    is_sent: it came with a request, which may name no place but those that ``_place`` allows."""

    directory: str
    version: str = ""
    digest: str = ""
    mode: Mode | None = None
    max_versions: int = 0
    is_sent: bool = False


class PauseRows(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start no step until ``ResumeRows``.  mode: what happens to running rows."""

    mode: Mode


class ResumeRows(msgspec.Struct, frozen=True, tag=True):
    """Go on after a pause."""


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Return the present state."""


Asked = UpdateWeights | PauseRows | ResumeRows | Describe


class WeightsState(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a command.

    version, digest: of the present weights.  number: of updates so far.  took_s: seconds, also for reading weights."""

    version: str
    number: int
    digest: str
    paused: bool
    took_s: float = 0.0


class WeightsFeature(EngineFeature):
    """The weights of one engine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._scheduler: Scheduler | None = None
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._made: tempfile.TemporaryDirectory[str] | None = None

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
            case UpdateWeights():
                async with self._lock:
                    weights = await asyncio.to_thread(self._checked, asked)
                    await self._do(Update(weights, asked.mode, asked.max_versions))
            case PauseRows(mode=mode):
                await self._do(Pause(mode))
            case ResumeRows():
                await self._do(Resume())
            case Describe():
                pass
        planner = self._planner
        present = planner.present
        return msgspec.json.encode(
            WeightsState(
                version=present.version,
                number=present.number,
                digest=present.digest,
                paused=planner.pause is not None,
                took_s=time.monotonic() - began,
            )
        )

    def _checked(self, asked: UpdateWeights) -> Weights:
        """Return the weights of a directory.  Raises WeightsError, and RequestError for another digest."""
        if len(asked.version) > MAX_VERSION_CHARS or not asked.version.isprintable():
            raise FieldError("version", f"expected up to {MAX_VERSION_CHARS} printable characters")
        config = self._config
        directory = self._place(asked.directory) if asked.is_sent else Path(asked.directory).absolute()
        if directory.is_file():
            directory = self._with_tensors(directory)
        spec = read_model(directory, config.plugins, config.model)
        digest = fingerprint(spec, config.model.load_format)
        if asked.digest and asked.digest != digest:
            raise RequestError(
                f"{asked.directory}: its digest is {digest}, not {asked.digest:.80}; the files have changed since, or "
                "another one was meant",
                param="digest",
            )
        return Weights(0, asked.version, str(spec.directory), digest)

    def _with_tensors(self, path: Path) -> Path:
        """Return a checkpoint that has the tensors of a file and for the rest those of the present weights."""
        config, present = self._config, self._planner.present
        self._made = self._made or tempfile.TemporaryDirectory(prefix="callboard-weights-")
        made = Path(self._made.name)
        base = Path(present.directory or resolve_checkpoint(config.model.path, config.model.revision))
        for old in made.iterdir():
            if old != base:
                shutil.rmtree(old)
        directory = made / str(next(self._numbers))
        overlay(path, base, directory)
        return directory

    def close(self) -> None:
        """Remove the checkpoints that were made here; they have links alone."""
        if self._made is not None:
            self._made.cleanup()

    def _place(self, path: str) -> Path:
        """Return the directory that a request names.  Raises FieldError for one that it may not name."""
        config = self._config
        if path == config.model.path:
            return resolve_checkpoint(path, config.model.revision)
        folder = Path(config.storage.folder, FOLDER).resolve()
        try:
            found = (folder / path).resolve()
        except (OSError, RuntimeError, ValueError):  # a link to itself, a zero byte
            found = Path("/")
        if not config.storage.folder or not found.is_relative_to(folder):
            raise FieldError(
                "path", f"{path[:200]!r} is neither model.path nor below {FOLDER}/ in storage.folder; save it there"
            )
        return found

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
