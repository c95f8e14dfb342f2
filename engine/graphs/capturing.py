"""The procedure of capturing: sizes and their order, agreement with other ranks, progress, errors.

Owns: that procedure, the same for every kind of graph; sizes few enough to capture at start and close enough that
padding costs little.  Does not know: the captured work.
"""

import gc
import logging
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tqdm import tqdm

from engine.graphs.device import GraphDevice
from engine.layers.comm import Comm
from engine.types.errors import GraphError

log = logging.getLogger(__name__)


class AnotherRankFailed(GraphError):
    """A vote has shown the failure of another rank, so this rank does not vote again."""


class PlansDiffer(GraphError):
    """The ranks' plans differ; every rank has seen it, so there is no vote."""


class Capturing:
    """The captures of one rank.  where: device of the tensors by which ranks vote.

    descending, rehearsal: False only in ``benchmarks/bench_graphs.py``, to measure what they gain.
    """

    def __init__(
        self, device: GraphDevice, comm: Comm, where: torch.device, *, descending: bool = True, rehearsal: bool = True
    ) -> None:
        self._device = device
        self._comm = comm
        self._where = where
        self._descending = descending
        self._rehearsal = rehearsal

    @torch.inference_mode()
    def capture(
        self,
        what: str,
        sizes: Sequence[int],
        warm_up: Callable[[int], object],
        record: Callable[[int], object],
        forget: Callable[[], object],
        *,
        advice: str,
        progress: bool,
    ) -> None:
        """Warm up and record every size, the largest first, so that smaller ones fit into its memory.

        warm_up: runs a size eagerly, so that kernels and libraries load outside of captures.
        record: captures a size.  forget: drops all captures.
        The largest size is captured twice, the first time as a rehearsal: it does the work that only a first capture
        does, and a model that cannot be captured fails at once.
        Raises GraphError, on every rank if one fails; the text ends with ``advice``, and all captures are dropped.
        """
        with self._together(f"graphs of {what} cannot be captured", forget, advice):
            self._compare_plans(what, sizes)
            self._capture(what, sizes, warm_up, record, progress)

    @contextmanager
    def _together(self, problem: str, forget: Callable[[], object], advice: str) -> Iterator[None]:
        """Run a block on all ranks or on none: each rank votes on its success, unless a vote has shown a failure.

        So all ranks vote equally often, and a vote never waits for a rank that has stopped voting."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # torch, the driver and plugins each raise their own
            failure = error
        voted = isinstance(failure, AnotherRankFailed)
        if isinstance(failure, PlansDiffer):
            raise GraphError(f"{problem} ({failure})") from None
        if voted or self.num_agreeing(failure is None) < self._comm.size:
            forget()
            cause = f"{type(failure).__name__}: {failure}" if failure and not voted else "another rank failed"
            raise GraphError(f"{problem} ({cause}); {advice}") from failure

    def _capture(
        self,
        what: str,
        sizes: Sequence[int],
        warm_up: Callable[[int], object],
        record: Callable[[int], object],
        progress: bool,
    ) -> None:
        sizes = sorted(sizes, reverse=self._descending)
        before = self._device.memory()
        with self._device.stream():
            for size in self._bar(f"warming up {what}", sizes, progress):
                warm_up(size)
            with frozen_garbage():
                if self._rehearsal and sizes:
                    self.wait_for_all()
                    record(max(sizes))
                for size in self._bar(f"capturing {what}", sizes, progress):
                    self.wait_for_all()
                    record(size)
        taken = self._device.memory().reserved_bytes - before.reserved_bytes
        log.info("captured %s in %d sizes up to %d: %.1f MB", what, len(sizes), max(sizes, default=0), taken / 1e6)

    @torch.inference_mode()
    def measure(
        self,
        sizes: Sequence[int],
        warm_up: Callable[[int], object],
        record: Callable[[int], object],
        forget: Callable[[], object],
        *,
        advice: str,
    ) -> int:
        """Return the bytes that ``capture`` will take, from captures of the two largest sizes, dropped at the end.

        The memory of the largest serves all others, which add only what a graph itself takes.
        Raises GraphError, on every rank if one fails.
        """
        taken = []
        with self._together("a trial capture failed", forget, advice), self._device.stream():
            self._compare_plans("a trial", sizes)
            for size in sorted(sizes, reverse=True)[:2]:
                warm_up(size)
                self._device.trim()
                before = self._device.memory().free_bytes
                with frozen_garbage():
                    self.wait_for_all()
                    record(size)
                self._device.trim()
                taken.append(max(0, before - self._device.memory().free_bytes))
        forget()
        return taken[0] + (len(sizes) - 1) * (taken[1] if len(taken) > 1 else 0)

    def _compare_plans(self, what: str, sizes: Sequence[int]) -> None:
        """Check that all ranks capture the same in the same order; else collectives of different graphs would meet.

        Raises GraphError with the plan of each rank, on every rank, before anything is captured."""
        if self._comm.size == 1:
            return
        ordered = sorted(sizes, reverse=self._descending)
        digest = zlib.crc32(repr((what, ordered, self._rehearsal)).encode())
        plan = torch.tensor([[digest, len(ordered), max(ordered, default=0)]], dtype=torch.int64, device=self._where)
        plans = self._comm.all_gather(plan, 0).tolist()
        if any(one != plans[0] for one in plans):
            each = "; ".join(f"rank {rank}: {num} up to {largest}" for rank, (_, num, largest) in enumerate(plans))
            raise PlansDiffer(f"ranks would capture different sizes ({each}); give all ranks the same configuration")

    def wait_for_all(self) -> None:
        """Wait until all ranks are here, so that no captured collective waits for a rank.  Raises AnotherRankFailed if
        one has failed."""
        if self._comm.size > 1 and self.num_agreeing(True) < self._comm.size:
            raise AnotherRankFailed("another rank failed")

    def num_agreeing(self, yes: bool) -> int:
        """Return the number of ranks that vote yes; all ranks must call it."""
        vote = torch.full((1,), int(yes), dtype=torch.float32, device=self._where)
        return round(self._comm.all_reduce(vote).item())

    def _bar(self, what: str, sizes: Sequence[int], progress: bool) -> Iterator[int]:
        """Yield the sizes and show the remaining ones and the memory on a progress bar."""
        off = None if progress else True  # None: off without a terminal
        with tqdm(sizes, desc=what, unit="size", disable=off) as bar:
            for size in bar:
                memory = self._device.memory()
                bar.set_postfix_str(
                    f"size {size}, {memory.reserved_bytes / 1e9:.1f} GB used, {memory.free_bytes / 1e9:.1f} GB free"
                )
                yield size


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Disable garbage collection inside, and restore its state afterwards.

    During a capture, a collection would free tensors at an unplanned moment.  It would also walk every object of the
    process for each of hundreds of captures: others measured 12 s of capture becoming 2 s without it."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # garbage of the captures holds graph memory; older objects are still frozen
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


# (up to, in steps of).  Small batches are common and small sizes are cheap to capture, so small sizes are dense.
TOKEN_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
TOKEN_STEP_BEYOND = 512
# In a batch of 1 to 8, every padded row costs time; in larger ones a row costs less than the steps between sizes.
SMALL_BATCHES = (1, 2, 3, 4, 6, 8)
ROW_STEPS = ((64, 8), (256, 16), (512, 32))
ROW_STEP_BEYOND = 64


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of rows of captured decode steps, ascending; the last one is ``largest``."""
    return _capped([*SMALL_BATCHES, *_ladder(SMALL_BATCHES[-1], ROW_STEPS, ROW_STEP_BEYOND, largest)], largest)


def piecewise_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of tokens of captured steps with prefill, ascending; the last one is ``largest``."""
    return _capped(_ladder(0, TOKEN_STEPS, TOKEN_STEP_BEYOND, largest), largest)


def round_up(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of the ascending ``sizes`` that holds ``count``; None if ``count`` is larger than all."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def _ladder(start: int, steps: Sequence[tuple[int, int]], step_beyond: int, largest: int) -> list[int]:
    """Return the sizes after ``start`` up to ``largest``, in the step of the range that each size is in."""
    sizes: list[int] = []
    for last, step in (*steps, (largest, step_beyond)):
        sizes += range(start + step, min(last, largest) + 1, step)
        start = max(start, last)
    return sizes


def _capped(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return the sizes below ``largest``, and ``largest``, so that every count up to it has a size."""
    return (*(size for size in sizes if size < largest), largest)
