"""Is the next step queued before the device is done with the last one?

A device that only takes time, around the real executor actor, with two steps in flight.  Beside it in the same run an
executor whose one thread launches and waits in turns.  Printed: launches that found the device busy, how long it was
idle in each step, and steps per second.  A device that takes no time shows what handing a step over to another thread
would cost where steps are done at once, as on a CPU.

    python benchmarks/bench_overlap.py --json benchmarks/results/overlap_2core_cpu.json
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop
from echo_executor import EchoRunner, Pending
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.actors.executor import Executor
from engine.actors.runner import PendingStep, Runner
from engine.messages import Step, Stop

IN_FLIGHT = 2


class BusyRunner(EchoRunner):
    """num_busy: launches that found the device at work.  idle_s: how long it had nothing to do."""

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s)
        self.num_busy = 0
        self.idle_s = 0.0

    def launch(self, step: Step) -> Pending:
        """Queue a step."""
        idle_s = time.perf_counter() - self._free_at
        self.num_busy += idle_s < 0
        if step.step_id:
            self.idle_s += max(0.0, idle_s)
        return super().launch(step)


class InTurns(Executor):
    """Launches what has come, and then waits for the oldest step, whatever comes meanwhile."""

    def _serve(self, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(partial(self._ready, runner.num_pages))
        self.loaded = True
        pending: deque[PendingStep] = deque()
        while True:
            if not pending or not self._steps.empty():
                step = self._steps.get()
                if step is None:
                    return
                pending.append(runner.launch(step))
            while pending and (pending[0].ready() or len(pending) > 1 or self._steps.empty()):
                loop.call_soon_threadsafe(partial(self._done, pending.popleft().collect()))


class Scheduler:
    """Answers each result with the next step."""

    def __init__(self, num_steps: int) -> None:
        self.done = asyncio.Event()
        self.began_at = 0.0
        self.ended_at = 0.0
        self._num_steps = num_steps
        self._num_sent = 0
        self._num_done = 0

    def connect(self, executor: Executor) -> None:
        """Where steps go."""
        self._executor = executor
        executor.connect(ready=lambda num_pages: self._begin(), done=lambda message: self._take())

    def _begin(self) -> None:
        self.began_at = time.perf_counter()
        self._send()

    def _take(self) -> None:
        """A step is back."""
        self._num_done += 1
        self._send()

    def _send(self) -> None:
        while self._num_sent < min(self._num_done + IN_FLIGHT, self._num_steps):
            self._executor.inbox.put(Step(step_id=self._num_sent))
            self._num_sent += 1
        if self._num_done == self._num_steps:
            self.ended_at = time.perf_counter()
            self.done.set()


async def measure(make: Callable[..., Executor], step_s: float, num_steps: int) -> dict[str, float]:
    """One executor, from its first step to its last."""
    runner, scheduler = BusyRunner(step_s), Scheduler(num_steps)
    executor = make(rank=0, capacity=64, load=lambda: runner)
    scheduler.connect(executor)
    running = asyncio.create_task(executor.run())
    await scheduler.done.wait()
    executor.inbox.put(Stop())
    await running
    seconds = scheduler.ended_at - scheduler.began_at
    return {
        "queued_while_busy": runner.num_busy,
        "launches": num_steps - 1,  # that have one before them
        "idle_us_per_step": 1e6 * runner.idle_s / num_steps,
        "steps_per_s": num_steps / seconds,
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("device ms", "executor", "queued while busy", "idle us/step", "steps/s", "to in turns")
    for step_ms, num_steps in ((5.0, arguments.steps), (1.0, 5 * arguments.steps), (0.0, 50 * arguments.steps)):
        best: dict[str, dict[str, float]] = {}
        for _ in range(arguments.turns):
            for name, make in (("in turns", InTurns), ("executor", Executor)):
                row = uvloop.run(measure(make, step_ms / 1e3, num_steps))
                best[name] = max(best.get(name, row), row, key=lambda one: one["steps_per_s"])
        for name, row in best.items():
            ratio = row["steps_per_s"] / best["in turns"]["steps_per_s"]
            rows.append({"device_ms": step_ms, "executor": name, **row, "ratio": ratio})
            table.add_row(
                f"{step_ms:g}",
                name,
                f"{row['queued_while_busy']:.0f} of {row['launches']:.0f}",
                f"{row['idle_us_per_step']:.0f}",
                f"{row['steps_per_s']:.0f}",
                f"{ratio:.3f}x",
            )
    Console(width=100).print(table)
    keep(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
