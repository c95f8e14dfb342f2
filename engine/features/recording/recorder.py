"""The flight recorder: the last minutes of the scheduler's messages, to be replayed when something has gone wrong.

Owns: a ring of turns of bounded size, a scheduler that lags behind by the ring's length, and when a file is written.
Does not know: what plans mean; the planner has no part in it.

When the ring is full, its oldest turn is played to the second scheduler before it is dropped.  So there is always a
state from which the ring continues, and it is never copied at once: it stands still while a thread writes it.
"""

import logging
import platform
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine import __version__
from engine.actors.actor import Link
from engine.actors.inboxes import ExecutorInbox, SchedulerInbox
from engine.actors.scheduler import Scheduler
from engine.features.recording.file import NAMED, Header, file_name, write_recording
from engine.features.recording.privacy import Privacy
from engine.features.recording.replayed import ReplayedScheduler
from engine.features.recording.state import state_entries
from engine.features.recording.turns import Turn, failure_of, plan_digest, planning_code
from engine.host.disk import make_folder
from engine.host.own_files import own_files
from engine.messages import FeatureRequest, Step, StepDone
from engine.plugins.blueprint import Blueprint
from engine.plugins.manager import Plugins
from engine.scheduling.planner import Planner
from engine.types.errors import CallboardError
from engine.types.notices import ExecutorsLost

log = logging.getLogger(__name__)

TURN_BYTES = 80  # memory of a turn in the ring in addition to its bytes
CATCH_UP_S = 0.001  # after so long no further turn is played in this one, unless the ring is at twice its size
STALLED_S = 30.0  # the limit of the alert CallboardStalled
BETWEEN_FILES_S = 60.0  # between two files that alerts have caused
MOST_FILES = 16  # files of alerts in the folder, and as many others; the oldest are deleted
AT_ONCE = 64  # entries of the state, or turns, that are written before other threads get their turn
PAUSE_S = 0.0002
MOST_WAITING = 4  # files
T = TypeVar("T")
ALERTS = ("died", "executors-lost", "pages-lost", "stalled", "waited")


class Recorder:
    """A recorder of one scheduler.

    folder: the folder of the files; it is created when it is needed.
    limit_bytes: size of the ring.  prompts: 'whole' or 'hashed'.
    waited_s: a request that has waited so long for its first step causes a file.
    clock: the source of the planner's clock, which is ``Recorder.clock``."""

    def __init__(
        self,
        blueprint: Blueprint,
        plugins: Plugins,
        *,
        folder: Path,
        limit_bytes: int,
        prompts: str,
        waited_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.waited_s = waited_s
        self._privacy = Privacy(blueprint.vocab_size, hashed=prompts == "hashed")
        self._blueprint = self._privacy.blueprint(blueprint)
        self._plugins = plugins
        self._limit_bytes = limit_bytes
        self._prompts = prompts
        self.now = clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Turn).decode
        self._ring: deque[bytes] = deque()
        self._num_bytes = 0
        self._behind: ReplayedScheduler | None = None
        self._messages: list[SchedulerInbox] = []
        self._readings: list[float] = []
        self._plans: list[bytes] = []
        self._alert = ""
        self._last_alert_at = -BETWEEN_FILES_S
        self._is_off = False
        self._writing: threading.Thread | None = None
        self._num_waiting = 0

    # ---- recording --------------------------------------------------------------------------

    def clock(self) -> float:
        """Return the planner's time, in seconds, and record it."""
        now = self.now()
        self._readings.append(now)
        return now

    def arrived(self, message: SchedulerInbox) -> None:
        """Note a message that is about to be handled."""
        if not self._messages:
            self._readings.clear()  # readings of views of the planner between two turns
        self._messages.append(message)

    def planned(self, plan: Step | FeatureRequest) -> None:
        """Note a plan that is sent to the executors."""
        self._plans.append(plan_digest(plan))

    def turned(self, failure: str = "") -> None:
        """End a turn.  failure: the error that ended the scheduler."""
        if self._messages:
            self._note_turn(failure)

    def _note_turn(self, failure: str) -> None:
        turn = Turn(
            tuple(map(self._privacy.message, self._messages)),
            array("d", self._readings).tobytes(),
            b"".join(self._plans),
            failure,
        )
        self._messages, self._readings, self._plans = [], [], []
        if self._is_off:
            return
        encoded = self._encode(turn)
        self._ring.append(encoded)
        self._num_bytes += len(encoded) + TURN_BYTES
        if self._num_bytes > self._limit_bytes and not self._is_writing:
            self._drop_oldest()
        if self._alert:
            self._write_unasked()

    def alert(self, why: str) -> None:
        """Write a file when the turn is over, since something is wrong.  why: one of ``ALERTS``."""
        self._alert = self._alert or why

    # ---- the ring ---------------------------------------------------------------------------

    def _drop_oldest(self) -> None:
        """Play the turns that do not fit to the scheduler that lags behind."""
        if self._behind is None:
            self._behind = ReplayedScheduler(self._blueprint, self._plugins)
        stop_at = time.perf_counter() + CATCH_UP_S
        while self._num_bytes > self._limit_bytes:
            encoded = self._ring.popleft()
            self._num_bytes -= len(encoded) + TURN_BYTES
            turn: Turn = self._decode(encoded)
            try:
                plans = self._behind.play(turn)
            except Exception as error:  # also a plugin's; the engine goes on without a recording
                self._give_up(failure_of(error))
                return
            if plans != turn.plans:
                self._give_up("it has made other plans the second time")
                return
            if time.perf_counter() > stop_at and self._num_bytes < 2 * self._limit_bytes:
                return

    def _give_up(self, reason: str) -> None:
        log.error(
            "the flight recorder is off: the scheduler cannot be replayed here: %s; a plugin that decides by more than "
            "its arguments may be the cause, or a bug",
            reason,
        )
        self._is_off = True
        self._behind = None
        self._ring.clear()
        self._num_bytes = 0

    # ---- files ------------------------------------------------------------------------------

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def write(self, why: str, name: str = "") -> "Future[str]":
        """Write the content of the ring to a file, in a thread; one file at a time.  name: name of the file.

        The future's result is the reason why the file was not written, '' if it was."""
        name, done = Path(name).name or file_name(why), Future[str]()
        before = self._writing if self._is_writing else None
        self._num_waiting = 0 if before is None else self._num_waiting + 1
        refusal = "nothing is recorded any more; the log has the reason" if self._is_off else ""
        if self._num_waiting > MOST_WAITING:
            refusal = f"{MOST_WAITING} others wait to be written"
        if refusal:
            log.error("recording %s is not written: %s", name, refusal)
            done.set_result(refusal)
            return done
        arguments = (before, why, name, list(self._ring), done)
        self._writing = threading.Thread(target=self._write_after, args=arguments, name="recording")
        self._writing.start()
        return done

    def _write_after(
        self, before: threading.Thread | None, why: str, name: str, ring: list[bytes], done: "Future[str]"
    ) -> None:
        """Write a file.  While this thread runs nothing is dropped from the ring, so the state stays as it is."""
        if before is not None:
            before.join()
        try:
            done.set_result(self._write(why, name, ring, PAUSE_S))
        except Exception:
            done.set_result("it failed; the log has the reason")
            raise

    def write_at_last(self, why: str) -> None:
        """Write a file and wait for it: no more turns follow."""
        if self._writing is not None:
            self._writing.join()
        if self._ring:
            self._write(why, file_name(why), list(self._ring), 0.0)

    def _write_unasked(self) -> None:
        why, self._alert = self._alert, ""
        now = self.now()
        if now - self._last_alert_at >= BETWEEN_FILES_S and not self._is_writing:
            self._last_alert_at = now
            self.write(why)

    def _write(self, why: str, name: str, ring: list[bytes], pause_s: float) -> str:
        """Write a file.  Return as ``write`` does.  pause_s: pause for other threads between two parts of the work."""
        header = Header(
            version=__version__,
            code=planning_code(),
            python=platform.python_version(),
            numpy=np.__version__,
            why=why,
            prompts=self._prompts,
            written_at_unix_s=time.time(),
            written_at=self.now(),
            blueprint=self._blueprint if self._behind is None else self._behind.blueprint,
        )
        state = () if self._behind is None else _with_pauses(state_entries(self._behind.state()), pause_s)
        turns = _with_pauses(ring, pause_s)
        try:
            make_folder(self.folder)
            _make_room(self.folder, is_asked=why not in ALERTS)
            write_recording(self.folder / name, header, state, turns)
        except (OSError, CallboardError) as error:
            log.error("recording %s was not written: %s", self.folder / name, error)
            return (error.strerror or "the folder cannot be written to") if isinstance(error, OSError) else str(error)
        log.warning("recording written (%s): callboard replay %s", why, self.folder / name)
        return ""


def _with_pauses(items: Iterable[T], pause_s: float) -> Iterator[T]:
    """Yield the items, with pauses in between, in which other threads can use the interpreter."""
    for number, item in enumerate(items):
        if pause_s and number % AT_ONCE == 0:
            time.sleep(pause_s)
        yield item


def _make_room(folder: Path, *, is_asked: bool) -> None:
    """Remove the oldest files to make room for another one.  is_asked: files that an operator requested, or alerts'."""
    alike = [one for one in own_files(folder, NAMED) if (NAMED.sub(r"\1", one.path.name) not in ALERTS) == is_asked]
    for one in alike[: -MOST_FILES + 1 or None]:
        one.path.unlink(missing_ok=True)


class _Told:
    """The link to the first executor, which passes plans to the recorder."""

    def __init__(self, executor: Link[ExecutorInbox], recorder: Recorder) -> None:
        self._executor = executor
        self._recorder = recorder

    def put(self, message: ExecutorInbox) -> None:
        if isinstance(message, Step | FeatureRequest):
            self._recorder.planned(message)
        self._executor.put(message)


class RecordedScheduler(Scheduler):
    """A scheduler whose turns are recorded.  Its planner's clock must be the recorder's."""

    def __init__(self, *, recorder: Recorder, executors: Sequence[Link[ExecutorInbox]], **others: Any) -> None:
        told = _Told(executors[0], recorder)
        super().__init__(executors=[told, *executors[1:]], **others)
        self._recorder = recorder

    def handle(self, message: SchedulerInbox) -> None:
        """Record a message and handle it."""
        recorder, planner = self._recorder, self._planner
        recorder.arrived(message)
        if isinstance(message, ExecutorsLost) and message.is_fault:
            recorder.alert("executors-lost")
        elif (
            isinstance(message, StepDone)
            and planner is not None
            and recorder.now() - planner.requests.due_since > STALLED_S
        ):
            recorder.alert("stalled")
        try:
            super().handle(message)
        except Exception as error:
            recorder.turned(failure_of(error))
            raise

    def flush(self) -> None:
        """Plan, and record the turn."""
        try:
            super().flush()
        except Exception as error:
            self._recorder.turned(failure_of(error))
            raise
        planner, stats = self._planner, self._last_stats
        held = stats is not None and stats.pages_used > 0
        if held and planner is not None and not planner.num_open and not planner.num_in_flight:
            self._recorder.alert("pages-lost")
        self._recorder.turned()

    def _call_observers(self, planner: Planner) -> None:
        for request in planner.finished:
            if request.queue_s is not None and request.queue_s > self._recorder.waited_s:
                self._recorder.alert("waited")
        super()._call_observers(planner)

    async def run(self) -> None:
        """Run, and write the last recording if an actor has crashed."""
        try:
            await super().run()
        except BaseException:  # another actor's crash is a cancellation here
            self._recorder.write_at_last("died")
            raise
