"""An event loop whose time stands still while anything can run, and then jumps to the next timer.

Owns: virtual time.  Does not know: what runs on it.  There are no sockets, no threads and no sleeping, so a run is a
pure function of the program, and an hour passes in an instant.
"""

import asyncio
import contextlib
import logging
import signal
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from types import FrameType
from typing import Any

from server.extensions.chaos.sim.failures import SimStuck

MOST_CALLBACKS_AT_ONCE = 200_000
CPU_LIMIT_S = 30.0


class SimDeadlock(Exception):
    """Every task waits and no timer is armed."""


class SimLivelock(Exception):
    """Callbacks run and run, and time does not advance."""


class _VirtualSelector:
    """The selector of the loop: there are no events, so waiting means that time passes."""

    def __init__(self, loop: "SimLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.pass_time(timeout)
        return []

    def close(self) -> None:
        pass


class SimLoop(base_events.BaseEventLoop):
    """An event loop with a clock of its own.

    thread_delay_s: how long a function runs in a "thread": inline, after that much virtual time."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, thread_delay_s: Callable[[Callable[..., Any], tuple[Any, ...]], float]) -> None:
        super().__init__()
        self._selector = _VirtualSelector(self)
        self._thread_delay_s = thread_delay_s
        self._now = 0.0
        self._num_tasks = 0
        self._num_at_once = 0

    def time(self) -> float:
        return self._now

    def play(self, work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> None:
        """Run ``work``, end what it leaves behind, and close.  fail: called with what it raises."""
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # crashes are meant here
        asyncio.set_event_loop(self)
        try:
            self.run_until_complete(work)
        except (SimDeadlock, SimLivelock) as error:
            fail(SimStuck(f"{type(error).__name__}: {error}"))
        except Exception as error:  # the simulation's own mistakes too are reported with their seed
            fail(error)
        finally:
            self._end_tasks()
            asyncio.set_event_loop(None)
            self.close()
            logging.disable(level)

    def _end_tasks(self) -> None:
        """Leave nothing behind that Python would warn about."""
        for _ in range(10):  # a task that ends may have begun another
            tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.call_later(1.0, self.stop)
            self.run_forever()

    def jump(self, seconds: float) -> None:
        """The clock is set forward, whatever is due in between."""
        self._now += seconds

    def pass_time(self, timeout: float | None) -> None:
        """Called by the selector: nothing is ready for ``timeout`` seconds, None for ever."""
        if timeout is None:
            raise SimDeadlock("every task waits and no timer is armed")
        if timeout > 0:
            # Exactly to the timer: adding the difference could round to just before it.
            self._now = self._scheduled[0].when()
            self._num_at_once = 0
        self._num_at_once += len(self._ready)
        if self._num_at_once > MOST_CALLBACKS_AT_ONCE:
            count, self._num_at_once = self._num_at_once, 0  # the clean-up has to run something too
            raise SimLivelock(f"{count} callbacks at t={self._now:g} s, and time does not advance")

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Names count per loop: the default ones count over the whole process and would differ in a replay."""
        self._num_tasks += 1
        return super().create_task(coro, name=name or f"task-{self._num_tasks}", context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run inline, later."""
        future = self.create_future()

        def run() -> None:
            if future.done():
                return  # cancelled meanwhile
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._thread_delay_s(func, args), run)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@contextlib.contextmanager
def cpu_limit() -> Iterator[None]:
    """The engine's own loops must end too; virtual time would never notice."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise SimStuck(f"some code did not return for {CPU_LIMIT_S:g} s of processor time")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
