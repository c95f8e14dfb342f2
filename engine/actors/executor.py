"""The executor actor: one rank's device, driven from a thread of its own.

consumes: Step (scheduler) · Stop (system)
produces: ExecutorReady, StepDone (scheduler)
waits for: a message; the device thread waits for the device.   owns: the device thread.

Only plain steps and their results cross between the loop and the thread.  The thread launches a step as soon as it
arrives and then collects the oldest one, so that with two steps in flight the device always has its next one queued.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, assert_never

from engine.actors.actor import Actor
from engine.actors.mailbox import Link
from engine.messages import ExecutorInbox, ExecutorReady, Step, StepDone

log = logging.getLogger(__name__)


class PendingStep(Protocol):
    """A launched step."""

    def ready(self) -> bool:
        """Whether ``collect`` would return at once."""
        ...

    def collect(self) -> StepDone:
        """Wait for the device and return the result."""
        ...


class Runner(Protocol):
    """The device half of a step; every call comes from the device thread."""

    num_pages: int

    def launch(self, step: Step) -> PendingStep:
        """Start a step without waiting for it."""
        ...

    def leave(self) -> None:
        """After a failure: give up the rank group, so that ranks which wait for this one fail too, and at once."""
        ...


class Executor(Actor[ExecutorInbox]):
    """rank: of this executor.  load: builds the runner, on the device thread."""

    def __init__(
        self,
        *,
        rank: int,
        capacity: int,
        load: Callable[[], Runner],
    ) -> None:
        super().__init__(f"executor{rank}", capacity)
        self._rank = rank
        self._load = load
        self._scheduler: Link[ExecutorReady | StepDone] | None = None
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self.loaded = False

    def connect(self, scheduler: Link[ExecutorReady | StepDone]) -> None:
        """Where results go; known only after the scheduler, which needs this actor's link, is built."""
        self._scheduler = scheduler

    async def run(self) -> None:
        """Start the device thread, then handle messages; the thread's failure is the actor's."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()

        def report(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        def device_thread() -> None:
            runner: Runner | None = None
            try:
                runner = self._load()
                self._serve(runner, loop)
            except BaseException as error:  # every failure of the thread must reach the actor
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
            if failed.done():
                failed.exception()

    def handle(self, message: ExecutorInbox) -> None:
        match message:
            case Step():
                self._steps.put(message)
            case _:
                assert_never(message)

    def close(self) -> None:
        """End the device thread after the step it is in; a load that still runs is left to die with the process."""
        self._steps.put(None)
        if self._thread is not None and self.loaded and not self._abandoned:
            self._thread.join(timeout=30)

    def abandon(self) -> None:
        """Do not wait for the device thread: it may never come back."""
        self._abandoned = True

    def _serve(self, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        scheduler = self._scheduler
        assert scheduler is not None, f"{self.name} ran before it was connected"
        ready = ExecutorReady(rank=self._rank, num_pages=runner.num_pages)
        _call_soon(loop, partial(scheduler.put, ready))
        self.loaded = True
        pending: deque[PendingStep] = deque()
        while True:
            if not pending or not self._steps.empty():
                step = self._steps.get()
                if step is None:
                    return
                pending.append(runner.launch(step))
            while pending and (pending[0].ready() or len(pending) > 1 or self._steps.empty()):
                _call_soon(loop, partial(scheduler.put, pending.popleft().collect()))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """From the device thread to the loop; a loop that has closed meanwhile no longer wants to know."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("the event loop closed before a step's result reached it")
