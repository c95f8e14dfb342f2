"""Replays one seed, or sweeps over many on several processes.

    python -m tests.sim run --seed N [--order K] [--ops i,j,k]     one run, message by message
    python -m tests.sim sweep --seeds N [--jobs J] [--first N]     until N runs counted; shrinks the first failure

Owns: the command line, worker processes, the summary.  Does not know: what happens in a run.
A run counts if scarce things happened in it; see ``RunOutcome.counts``.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.features.recording.shrink import shrink
from server.extensions.chaos.sim.dice import draw
from server.extensions.chaos.sim.loop import cpu_limit
from server.extensions.chaos.sim.marks import MARKS
from server.extensions.chaos.sim.scenario import describe
from server.extensions.chaos.sim.world import RunOutcome, World

REPOSITORY = Path(__file__).parents[2]
SHRINK_ORDERS = [0, 1, 2]


def play_seed(
    seed: int, order: int = 0, ops: list[int] | None = None, log: Callable[[str], None] | None = None
) -> tuple[RunOutcome, Exception | None]:
    """One run, and what it failed with."""
    scenario = draw(seed, order)
    if ops is not None:
        scenario = scenario.only(ops)
    world = World(scenario, log)
    with cpu_limit():
        outcome = world.run()
    return outcome, world.failure


def replay_line(seed: int, order: int = 0, ops: list[int] | None = None) -> str:
    """The command that shows a run again."""
    line = f"python -m tests.sim run --seed {seed}"
    if order:
        line += f" --order {order}"
    if ops is not None:
        line += f" --ops {','.join(map(str, ops))}"
    return line


def shrink_seed(seed: int, limit_s: float = 60.0) -> tuple[list[int], int]:
    """The fewest operations of a failing seed that fail the same way, and the order in which they do."""
    first, _ = play_seed(seed)
    assert first.failure is not None, f"seed {seed} does not fail"
    kind = first.failure[0]

    def fails(ops: list[int], order: int) -> bool:
        outcome, _ = play_seed(seed, order, ops)
        return outcome.failure is not None and outcome.failure[0] == kind

    return shrink(list(draw(seed).ops), SHRINK_ORDERS, fails, limit_s)


def explain(failures: Sequence[RunOutcome], limit_s: float = 60.0) -> str:
    """Return the failure of the first of these, the command that shows it, and another that shows less of it.

    limit_s: for shrinking."""
    first = min(failures, key=lambda outcome: outcome.seed)
    assert first.failure is not None, f"seed {first.seed} has not failed"
    kind, message = first.failure
    ops, order = shrink_seed(first.seed, limit_s)
    return (
        f"seed {first.seed} FAILED, {kind}: {message}\n"
        f"replay: {replay_line(first.seed)}\n"
        f"shrunk to {len(ops)} of {len(draw(first.seed).ops)} operations: {replay_line(first.seed, order, ops)}"
    )


# ---- many seeds ---------------------------------------------------------------------------------


@dataclass
class Sweep:
    """The findings of a sweep.  marks: in how many runs each happened."""

    num_runs: int = 0
    num_counted: int = 0
    num_steps: int = 0
    num_requests: int = 0
    virtual_s: float = 0.0
    marks: Counter[str] = field(default_factory=Counter)
    failures: list[RunOutcome] = field(default_factory=list)

    def add(self, outcome: RunOutcome) -> None:
        """Take in one run."""
        self.num_runs += 1
        self.num_counted += outcome.counts
        self.num_steps += outcome.num_steps
        self.num_requests += outcome.num_requests
        self.virtual_s += outcome.virtual_s
        self.marks.update(outcome.marks.keys())
        if outcome.failure is not None:
            self.failures.append(outcome)

    @property
    def missing(self) -> list[str]:
        """Marks that never happened."""
        return [mark for mark in MARKS if not self.marks[mark]]


def sweep(num_seeds: int, jobs: int, first: int = 0, on_run: Callable[[RunOutcome], None] | None = None) -> Sweep:
    """Runs seeds from ``first`` on until ``num_seeds`` have counted, on ``jobs`` processes; ends early at a failure.

    Each process takes every ``jobs``-th seed until it has its share, so which seeds run does not depend on timing."""
    shares = [num_seeds // jobs + (index < num_seeds % jobs) for index in range(jobs)]
    result = Sweep()
    decoder = msgspec.json.Decoder(RunOutcome)
    workers: list[subprocess.Popen[bytes]] = []
    adding = Lock()

    def read(worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            if not line.endswith(b"\n"):
                break  # it was ended in the middle of it
            outcome = decoder.decode(line)
            with adding:
                result.add(outcome)
                if on_run is not None:
                    on_run(outcome)
            if outcome.failure is not None:
                for other in workers:
                    other.terminate()

    for index, share in enumerate(shares):
        command = [sys.executable, "-m", "tests.sim", "worker", f"{first + index}", f"{jobs}", f"{share}"]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY))
    readers = [Thread(target=read, args=(worker,)) for worker in workers]
    for reader in readers:
        reader.start()
    for reader, worker in zip(readers, workers, strict=True):
        reader.join()
        assert worker.stdout is not None
        worker.stdout.close()
        status = worker.wait()
        assert status == 0 or result.failures, f"a worker of the sweep ended with status {status}"
    return result


def _work(first: int, stride: int, share: int) -> int:
    """A worker of ``sweep``: one line of JSON per run."""
    gc.freeze()
    seed, num_counted = first, 0
    while num_counted < share:
        outcome, _ = play_seed(seed)
        num_counted += outcome.counts
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()
        seed += stride
    return 0


# ---- the command line ---------------------------------------------------------------------------


def _run(seed: int, order: int, ops: list[int] | None, *, quiet: bool) -> int:
    scenario = draw(seed, order)
    if not quiet:
        print(scenario.setup)
    outcome, failure = play_seed(seed, order, ops, None if quiet else print)
    if not quiet:
        for number in ops or []:
            print(f"op {number}: {describe(scenario.ops[number])}")
        for mark, count in sorted(outcome.marks.items()):
            print(f"{count:6} {mark}")
    if failure is not None:
        traceback.print_exception(failure, file=sys.stdout)
    print(
        f"seed {seed}: {outcome.num_requests} requests, {outcome.num_steps} steps, {outcome.virtual_s:.3f} virtual s, "
        f"digest {outcome.digest:08x}: {'FAILED' if failure else 'passed'}"
    )
    return int(failure is not None)


def _sweep(num_seeds: int, jobs: int, first: int) -> int:
    console = Console()
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds that count", total=num_seeds)
        result = sweep(num_seeds, jobs, first, lambda outcome: progress.advance(task, int(outcome.counts)))
    took_s = time.monotonic() - began
    table = Table("mark", "runs", title="what happened in how many runs")
    for mark in sorted({*MARKS, *result.marks}):
        table.add_row(mark, str(result.marks[mark]), style="red" if mark in MARKS and not result.marks[mark] else "")
    console.print(table)
    console.print(
        f"{result.num_runs} runs ({result.num_counted} count), {result.num_requests} requests, "
        f"{result.num_steps} steps, {result.virtual_s:.0f} virtual s in {took_s:.1f} s: "
        f"{60 * result.num_runs / took_s / jobs:.0f} seeds/min/process"
    )
    if result.failures:
        console.print(explain(result.failures), soft_wrap=True, markup=False, highlight=False)
    elif result.missing:
        console.print(f"VOID, this never happened: {', '.join(result.missing)}", soft_wrap=True)
    return int(bool(result.failures or result.missing))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="replay one seed")
    run.add_argument("--seed", type=int, required=True)
    run.add_argument("--order", type=int, default=0, help="the same with other delays")
    run.add_argument("--ops", type=lambda text: [int(one) for one in text.split(",")], help="only these operations")
    run.add_argument("--quiet", action="store_true", help="only the last line")
    many = commands.add_parser("sweep", help="run many seeds")
    many.add_argument("--seeds", type=int, default=1000, help="how many runs must count")
    many.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    many.add_argument("--first", type=int, default=0, help="the first seed")
    worker = commands.add_parser("worker")
    worker.add_argument("numbers", type=int, nargs=3)
    given = parser.parse_args(arguments)
    if given.command == "run":
        return _run(given.seed, given.order, given.ops, quiet=given.quiet)
    if given.command == "sweep":
        return _sweep(given.seeds, given.jobs, given.first)
    return _work(*given.numbers)
