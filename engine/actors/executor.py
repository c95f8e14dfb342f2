"""The executor actor: one rank's device, driven from a thread of its own.

consumes: Step, FeatureRequest (scheduler) · Profile (an operator, through their group) · Stop (system)
produces: StepDone, FeatureAnswer, and the number of pages once it has loaded (scheduler, through its group)
waits for: a message; the collector waits for the device.   owns: the device thread and the collector's.

Only plain steps and their results cross between the loop and the threads.  The device thread launches a step as soon
as it arrives: with two steps in flight, step N+2 arrives when N is done, and must be queued while N+1 runs.  So it
never waits for the device; a step that is finished after its launch, such as any step on a CPU, is collected at once.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import assert_never

from engine.actors.actor import Actor
from engine.actors.inboxes import ExecutorInbox, FromExecutor
from engine.actors.runner import PendingStep, Runner
from engine.messages import FeatureRequest, Step, StepDone
from engine.types.notices import Profile

log = logging.getLogger(__name__)


class Executor(Actor[ExecutorInbox]):
    """The actor of one rank's device.  rank: its number.  load: builds the runner, on the device thread."""

    def __init__(self, *, rank: int, capacity: int, load: Callable[[], Runner]) -> None:
        super().__init__(f"executor{rank}", capacity)
        self._load = load
        self._steps: queue.SimpleQueue[Step | Profile | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._runner: Runner | None = None
        self._abandoned = False
        self.loaded = False

    def connect(self, *, ready: Callable[[int], None], done: Callable[[FromExecutor], None]) -> None:
        """Set the receivers of results on the event loop.  ready: called with the number of pages when loaded."""
        self._ready = ready
        self._done = done

    async def run(self) -> None:
        """Start the device thread, then handle messages; a failure of the thread fails the actor."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        failed.add_done_callback(asyncio.Future.exception)  # retrieves an exception that is set after this has ended

        def report(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        def device_thread() -> None:
            runner: Runner | None = None
            try:
                runner = self._load()
                self._serve(runner, loop)
            except BaseException as error:  # every failure of the thread must reach the actor
                if not isinstance(error, Exception):  # a task that raises SystemExit ends the loop without a message
                    error = RuntimeError(f"{error!r} on the device thread")
                _call_soon(loop, partial(report, error))
                if runner is not None:
                    runner.leave()

        self._thread = threading.Thread(target=device_thread, name=self.name, daemon=True)
        self._thread.start()
        handling = asyncio.ensure_future(super().run())
        try:
            await asyncio.wait((handling, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            await handling
        finally:
            handling.cancel()

    def handle(self, message: ExecutorInbox) -> None:
        match message:
            case Step() | Profile():
                self._steps.put(message)
            case FeatureRequest():
                loop = asyncio.get_running_loop()
                assert self._runner is not None, f"a request of {message.feature} came before there is a runner"
                self._runner.receive(message, lambda answer: _call_soon(loop, partial(self._done, answer)))
            case _:
                assert_never(message)

    def close(self) -> None:
        """End the device thread after its queued steps; a load that still runs ends with the process."""
        self._steps.put(None)
        if self._thread is not None and self.loaded and not self._abandoned:
            self._thread.join(timeout=30)

    def abandon(self) -> None:
        """Mark the device thread as hung, so that ``close`` does not wait for it."""
        self._abandoned = True

    def _serve(self, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        self._runner = runner
        _call_soon(loop, partial(self._ready, runner.num_pages))
        self.loaded = True
        collector = Collector(
            f"{self.name}.collector",
            deliver=lambda done: _call_soon(loop, partial(self._done, done)),
            stop=lambda: self._steps.put(None),
        )
        try:
            while (work := self._steps.get()) is not None:
                if isinstance(work, Step):
                    collector.take(runner.launch(work))
                else:
                    runner.profile(work)
        finally:
            collector.end()
        collector.join()
        runner.close()


class Collector:
    """Collects launched steps in order, on a thread.  deliver: receives each result.  stop: called on a failure.

    The device thread calls ``take``, ``end`` and ``join``."""

    def __init__(self, name: str, deliver: Callable[[StepDone], None], stop: Callable[[], None]) -> None:
        self._deliver = deliver
        self._stop = stop
        self._waiting: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._num_taken = 0
        self._num_delivered = 0  # of the steps in ``_num_taken``; written by the collector's thread alone
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, pending: PendingStep) -> None:
        """Deliver a step's result: at once if it is ready, else when the device has finished it."""
        if self._num_delivered == self._num_taken and pending.ready():
            self._deliver(pending.collect())
        else:
            self._num_taken += 1
            self._waiting.put(pending)

    def end(self) -> None:
        """Accept no more steps."""
        self._waiting.put(None)

    def join(self) -> None:
        """Wait until all taken steps are delivered.  Raises what collecting raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (pending := self._waiting.get()) is not None:
                self._deliver(pending.collect())
                self._num_delivered += 1
        except BaseException as error:  # every failure must reach the device thread, which passes it to the actor
            self._error = error
            self._stop()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back on the loop from a thread; does nothing if the loop has closed meanwhile."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("the event loop closed before a step's result reached it")
