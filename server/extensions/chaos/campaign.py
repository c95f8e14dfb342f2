"""Many runs on several processes, and what they add up to.

Owns: the processes, the sums.  Does not know: what happens in a run, how sums are shown.
"""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock, Thread

import msgspec

from engine.features.recording.shrink import shrink
from engine.types.errors import CallboardError
from server.extensions.chaos.bugs import Bug
from server.extensions.chaos.worlds import KINDS, RunKind, RunReport, is_alike, kind_of

ORDERS = [0, 1, 2]
MOST_SEEDS = 200  # that are tried for a planted bug
TELLING = (70, 4, 49, 47, 42)  # seeds that find many bugs soon


@dataclass
class Campaign:
    """The sums of many runs.  by_kind: runs of each.  failures: those that failed."""

    num_runs: int = 0
    virtual_s: float = 0.0
    num_asked: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    num_pages_counted: int = 0
    num_events: int = 0
    seconds: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    scarce: Counter[str] = field(default_factory=Counter)
    failures: list[RunReport] = field(default_factory=list)

    def add(self, run: RunReport) -> None:
        """Add a run."""
        self.num_runs += 1
        self.by_kind[run.kind] += 1
        for name in ("virtual_s", "num_asked", "num_ended", "num_tokens", "num_pages_counted", "num_events"):
            setattr(self, name, getattr(self, name) + getattr(run, name))
        self.faults.update(run.faults)
        self.scarce.update(run.scarce)
        if run.found_by:
            self.failures.append(run)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The fewest operations found with which a run still fails the same way.  num_before: of the whole run."""

    run: RunReport
    kept: list[int]
    order: int
    num_before: int
    in_words: list[str]


def numbers(first: int, stride: int, num_runs: int, ends_at: float) -> Iterator[int]:
    """Return the numbers of the runs of a process, until there were enough or time is up.  num_runs: 0 for no limit."""
    number = first
    while (not num_runs or number < first + num_runs * stride) and time.monotonic() < ends_at:
        yield number
        number += stride


def work(first: int, stride: int, num_runs: int, minutes: float, only: str = "") -> None:
    """Be one process of a campaign: print a line of JSON for each run, and end behind the first that fails."""
    ends_at = float("inf") if num_runs else time.monotonic() + 60 * minutes
    for number in numbers(first, stride, num_runs, ends_at):
        kind, seed = kind_of(number, only)
        run = kind.play(seed)
        sys.stdout.buffer.write(msgspec.json.encode(run) + b"\n")
        sys.stdout.buffer.flush()
        if run.found_by:
            return


def campaign(
    first: int, num_runs: int, minutes: float, jobs: int, on_run: Callable[[RunReport], None], only: str = ""
) -> Campaign:
    """Run from the numbered run on, on so many processes; ends early at a failure.  only: see ``kind_of``."""
    result, adding, began = Campaign(), Lock(), time.monotonic()
    decoder = msgspec.json.Decoder(RunReport)
    workers: list[subprocess.Popen[bytes]] = []

    def read(worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            if not line.endswith(b"\n"):
                return  # the process was ended in the middle of it
            run = decoder.decode(line)
            with adding:
                result.add(run)
                on_run(run)
            if run.found_by:
                for other in workers:
                    other.terminate()

    for index in range(jobs):
        share = num_runs // jobs + (index < num_runs % jobs)
        if num_runs and not share:
            continue
        command = [sys.executable, "-m", "callboard", "chaos", "--seed", str(first + index), "--lines", str(jobs)]
        command += ["--runs", str(share)] if num_runs else ["--minutes", str(minutes)]
        command += ["--kind", only] if only else []
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    readers = [Thread(target=read, args=(worker,)) for worker in workers]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.close()
        if worker.wait() and not result.failures:
            raise CallboardError(f"a process of the campaign ended with status {worker.returncode}")
    result.seconds = time.monotonic() - began
    return result


def shrunk(failed: RunReport, limit_s: float = 20.0) -> Shrunk:
    """Look for the fewest operations with which a failing run still fails the same way."""
    kind = KINDS[failed.kind]
    words, alike = kind.operations(failed.seed), is_alike(failed)

    def fails(kept: list[int], order: int) -> bool:
        return alike(kind.play(failed.seed, kept, order))

    kept, order = shrink(list(words), ORDERS, fails, limit_s)
    return Shrunk(kind.play(failed.seed, kept, order), kept, order, len(words), [words[number] for number in kept])


def seeds() -> Iterator[int]:
    """Return the seeds that are tried for a planted bug."""
    yield from dict.fromkeys((*TELLING, *range(MOST_SEEDS)))


def hunt(bug: Bug) -> RunReport | None:
    """Plant a bug and return the first run that fails, None if it survives all seeds."""
    kind: RunKind = KINDS[bug.kind]
    with bug.mutant.planted():
        for seed in seeds():
            run = kind.play(seed)
            if run.found_by:
                return run
    return None
