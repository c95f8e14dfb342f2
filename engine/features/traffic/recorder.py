"""Records an engine's traffic as a trace: taps on the scheduler's links note the messages that pass.

Owns: the writer's thread, the files below ``storage.folder``/traces and how much space they take.
Does not know: what traces are for, how any message comes about.
On the event loop a message costs one append; all else is done on the thread, twice a second.
"""

import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np

from engine import __version__
from engine.actors.actor import Link
from engine.config import Config
from engine.features.traffic.settings import TraceSettings
from engine.features.traffic.sizes import StepSize, StepSizes
from engine.features.traffic.trace import (
    FORMAT,
    LARGEST_BLOCK,
    Line,
    TracedRequest,
    TracedStep,
    TracedSteps,
    TraceHead,
    chained,
    finish_name,
)
from engine.host.appended_file import AppendedFile
from engine.host.disk import make_folder
from engine.host.own_files import own_files, remove_oldest
from engine.messages import Admit, Failed, Step, StepDone, Tokens
from engine.plugins.hookspecs import hookimpl
from engine.plugins.kinds import KINDS, chosen_plugins
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.rows import PlannerLimits
from engine.settings.additions import additions
from engine.settings.sections import StorageSection
from engine.types.errors import ConfigError
from engine.types.notices import ExecutorsLost
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

M = TypeVar("M")
DIGEST_CHARS = 12  # of a part's, in a trace
MIB = 1 << 20
EVERY_S = 0.5
MOST_WAITING = 1 << 17  # messages; a disk that is so far behind ends the recording
TRY_AGAIN_S = 5.0  # after a disk has refused a write
FILES = 4  # parts of the bound; the oldest is deleted for the next
NAMED = r"-[0-9]{8}T[0-9]{6}-[0-9]+-[0-9]+\.jsonl"  # after the model's name: time, process, number
RELEVANT = tuple(kind.name for kind in KINDS.values() if kind.decides or kind.moves_pages)  # plans depend on them
encode = msgspec.json.Encoder().encode


class Tap(Generic[M]):
    """A link that notes every message that is put into it."""

    def __init__(self, link: Link[M], note: Callable[[object], None]) -> None:
        self._link = link
        self._note = note

    def put(self, message: M) -> None:
        """Note a message, then put it: its consequences come later."""
        self._note(message)
        self._link.put(message)


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended.  output: int32s."""

    at: float
    admit: Admit
    output: list[bytes] = field(default_factory=list)


class TraceRecorder:
    """A recorder of traffic: an observer, with taps for the links from and to the scheduler."""

    def __init__(self, storage: StorageSection, model: str, clock: Callable[[], float]) -> None:
        """Create the folder, and no file yet.  clock: the planner's.  Raises ConfigError if it cannot be written to."""
        self._model = model
        self._clock = clock
        self._files = _Files(Path(storage.folder) / "traces", model, TraceSettings.read(storage).trace_mb * MIB)
        self._key = secrets.token_bytes(16)
        self._notes: deque[tuple[float, object]] = deque()
        self._open: dict[int, _OpenRequest] = {}
        self._in_flight: deque[tuple[float, StepSize]] = deque()
        self._completed_at = 0.0
        self._sizes = StepSizes(0)
        self._block = LARGEST_BLOCK
        self._steps: list[TracedStep] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._files.path

    def tap(self, link: Link[M]) -> Link[M]:
        """Return a link that records its messages."""
        return Tap(link, self._note)

    def begin(self, limits: PlannerLimits, config: Config) -> None:
        """Begin a trace: a planner is there, or works with other settings from now on."""
        block = min(LARGEST_BLOCK, limits.page_size)
        settings = relevant_settings(config)
        self._note(TraceHead(FORMAT, __version__, self._model, time.time(), block, limits, settings))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
            self._thread.start()

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        """Note requests that have ended; their last tokens were noted before."""
        self._note(requests)

    def close(self) -> None:
        """Write the rest; takes as long as the disk does."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def _note(self, message: object) -> None:
        if not self._ending.is_set():
            self._notes.append((self._clock(), message))

    # ---- on the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            ended = False
            while not ended:
                ended = self._ending.wait(EVERY_S)
                if len(self._notes) > MOST_WAITING:
                    raise OSError(f"{len(self._notes)} messages wait to be written")
                self._take()
                self._files.end_of_batch()
        except Exception as error:  # whatever the error, requests go on
            self._ending.set()
            self._notes.clear()
            log.error("traffic is no longer recorded: %r", error)
        self._files.close()

    def _take(self) -> None:
        tokens: list[Tokens] = []
        for _ in range(len(self._notes)):  # those that come meanwhile are of the next batch
            at, message = self._notes.popleft()
            match message:
                case Step():
                    self._in_flight.append((at, self._sizes.measure(message)))
                case StepDone(rank=0) if self._in_flight:
                    launched_at, size = self._in_flight.popleft()
                    began_at = max(launched_at, self._completed_at)
                    self._completed_at = at
                    self._steps.append(TracedStep(round(began_at, 6), round(at - began_at, 6), *size))
                case Tokens():
                    tokens.append(message)
                case Admit():
                    self._open[message.request_id] = _OpenRequest(at, message)
                case Failed():
                    self._open.pop(message.request_id, None)
                case ExecutorsLost():
                    self._in_flight.clear()
                case TraceHead():
                    self._write_steps()
                    self._files.start(message)
                    self._block = message.block
                    if message.limits.max_running != self._sizes.num_rows:
                        self._sizes = StepSizes(message.limits.max_running)
                case list() | tuple():
                    self._sort_out(tokens)
                    tokens.clear()
                    for one in message:
                        self._ended(one)
        self._sort_out(tokens)
        self._write_steps()

    def _write_steps(self) -> None:
        if self._steps:
            self._files.write(TracedSteps(self._steps))
            self._steps = []

    def _sort_out(self, messages: list[Tokens]) -> None:
        """Give each request its tokens: one look-up per request for all steps together."""
        if not messages:
            return
        ids = np.concatenate([np.frombuffer(one.request_ids, dtype=np.int64) for one in messages])
        tokens = np.concatenate([np.frombuffer(one.token_ids, dtype=np.int32) for one in messages])
        ids, tokens = ids[tokens >= 0], tokens[tokens >= 0]
        order = np.argsort(ids, kind="stable")
        ids, tokens = ids[order], tokens[order]
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        for request_id, of_it in zip(ids[starts].tolist(), np.split(tokens, starts[1:]), strict=True):
            if (request := self._open.get(request_id)) is not None:
                request.output.append(of_it.tobytes())

    def _ended(self, one: RequestMetrics) -> None:
        request = self._open.pop(one.request_id, None)
        finish = finish_name(one.finish)
        if request is None or finish is None:
            return
        admit, params = request.admit, request.admit.params
        parts = {name: part.digest[:DIGEST_CHARS] for name, part in sorted(admit.parts.items())}
        tokens = (admit.token_ids + b"".join(request.output))[: 4 * (one.num_prompt_tokens + one.num_output_tokens)]
        self._files.write(
            TracedRequest(
                at=round(one.arrived_at, 6),
                prompt=one.num_prompt_tokens,
                output=len(tokens) // 4 - one.num_prompt_tokens,
                finish=finish,
                blocks=chained(tokens, self._block, self._key, f"{''.join(parts.values())} {admit.cache_salt}"),
                e2e_s=round(one.e2e_s, 6),
                ttft_s=one.ttft_s and round(one.ttft_s, 6),
                tpot_s=one.tpot_s and round(one.tpot_s, 7),
                max_tokens=params.max_tokens,
                resumed=admit.num_resumed,
                priority=one.priority,
                tenant=admit.origin.tenant,
                client=admit.origin.client,
                parts=parts,
                whole=_whole(params),
                cached=one.cached_tokens,
                retractions=one.num_retractions,
            )
        )


def _whole(params: SamplingParams) -> Literal["", "prompt_logprobs", "states"]:
    if not params.needs_whole_prompt:
        return ""
    return "prompt_logprobs" if params.prompt_logprobs is not None else "states"


def relevant_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that a prediction depends on, without any secret."""
    chosen = chosen_plugins(config)
    kinds = {kind: chosen.get(kind, "none") for kind in RELEVANT}
    names = [f"{kind}.{name}" for kind, name in kinds.items()]
    options = {name: table for name, table in config.plugins.options.items() if name in names}
    sections = {name: msgspec.to_builtins(getattr(config, name)) for name in ("kv", "scheduler", "limits")}
    brought = {one.table: settings for one in additions() if (settings := one.of(config).recorded())}
    return {**sections, **brought, "plugins": {**kinds, "options": options}}


class _Files:
    """The files of traces, one after another.  Together they take no more than ``most_bytes``, except for a batch.

    Lines that a full or failed disk does not take are lost; another file begins once it takes something again."""

    def __init__(self, folder: Path, model: str, most_bytes: int) -> None:
        self._folder = folder
        self._stem = re.sub(r"[^\w.-]", "_", model)
        self._named = re.compile(re.escape(self._stem) + NAMED)
        self._most_bytes = most_bytes
        self._number = 0
        self._file: AppendedFile | None = None
        self._head: TraceHead | None = None
        self._lines: list[bytes] = []  # not in the file yet
        self._is_empty = True  # except for its head
        self._failed_at: float | None = None
        self.path = folder
        try:
            make_folder(folder)
        except OSError as error:
            raise ConfigError(f"storage.folder: {folder} cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"storage.folder: {folder} may not be written to")

    def start(self, head: TraceHead) -> None:
        """Begin a file after the present one, which is deleted if it has only a head."""
        self.end_of_batch()
        self._leave()
        self._head = head

    def write(self, line: Line) -> None:
        """Add a line to the next batch."""
        self._lines.append(encode(line) + b"\n")

    def end_of_batch(self) -> None:
        """Write the batch.  A reader finds whole lines; a file that is full is followed by another."""
        lines, self._lines = self._lines, []
        if self._failed_at is not None and time.monotonic() < self._failed_at + TRY_AGAIN_S:
            return
        try:
            if self._head is not None:
                if self._file is None or self._file.size > self._most_bytes // FILES:
                    self._file = self._open(self._head)
                self._file.append(b"".join(lines))
                self._is_empty &= not lines
            remove_oldest(own_files(self._folder, self._named), self._most_bytes, until=self.path)
        except OSError as error:
            if self._failed_at is None:
                log.error("traffic is not recorded: %s; it is tried again every %g s", error, TRY_AGAIN_S)
            self._failed_at = time.monotonic()
            self._leave()
        else:
            self._failed_at = None

    def _open(self, head: TraceHead) -> AppendedFile:
        self.close()
        self._is_empty = True
        self._number += 1
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.path = self._folder / f"{self._stem}-{when}-{os.getpid()}-{self._number}.jsonl"
        file = AppendedFile(self.path, encode(head) + b"\n")
        log.info("traffic is recorded in %s", self.path)
        return file

    def _leave(self) -> None:
        if self._file is not None and self._is_empty:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
