"""How captures are done: in which sizes and order, together with other ranks, what is shown, what a failure says.

Owns: that procedure, the same for every kind of graph; sizes few enough to capture at start and close enough that
padding costs little.  Does not know: what is captured.
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
    """A vote has said so: this rank votes no more."""


class PlansDiffer(GraphError):
    """Every rank has seen it: there is nothing to vote on."""


class Capturing:
    """One rank's.  where: a tensor's device, to vote on with the other ranks.

    descending, rehearsal: False only to measure what they are good for, see ``benchmarks/bench_graphs.py``.
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
        """Warm up and record every size, the largest first: smaller ones then fit into the memory that it has taken.

        warm_up: runs a size as it is, so that kernels and libraries load outside of captures.  record: captures it.
        forget: drops all captures.
        The largest is captured once more in front: what only a first capture does is not done between others then, and
        one that cannot be captured at all fails at once.
        Raises GraphError, on every rank if it is one that failed; it says ``advice``, and all captures are dropped.
        """
        with self._together(f"graphs of {what} cannot be captured", forget, advice):
            self._compare_plans(what, sizes)
            self._capture(what, sizes, warm_up, record, progress)

    @contextmanager
    def _together(self, said: str, forget: Callable[[], object], advice: str) -> Iterator[None]:
        """What all ranks do or none: each votes whether it has come through, unless it was told of a failure before.

        So all ranks vote equally often, and a vote never waits for a rank that has stopped voting."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # torch, the driver and plugins each have their own
            failure = error
        told = isinstance(failure, AnotherRankFailed)
        if isinstance(failure, PlansDiffer):
            raise GraphError(f"{said} ({failure})") from None
        if told or self.num_agreeing(failure is None) < self._comm.size:
            forget()
            cause = f"{type(failure).__name__}: {failure}" if failure and not told else "another rank failed"
            raise GraphError(f"{said} ({cause}); {advice}") from failure

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
        """Bytes that ``capture`` will take, by capturing the two largest sizes, which are dropped at the end.

        The largest one's memory serves all others, which add what a graph itself takes.
        Raises GraphError, on every rank if it is one that failed.
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
        """All ranks capture the same in the same order, or the collectives in their graphs would meet others'.

        Raises GraphError, on every rank, that says who would do what, before anything is captured."""
        if self._comm.size == 1:
            return
        ordered = sorted(sizes, reverse=self._descending)
        digest = zlib.crc32(repr((what, ordered, self._rehearsal)).encode())
        plan = torch.tensor([[digest, len(ordered), max(ordered, default=0)]], dtype=torch.int64, device=self._where)
        plans = self._comm.all_gather(plan, 0).tolist()
        if any(one != plans[0] for one in plans):
            told = "; ".join(f"rank {rank}: {num} up to {largest}" for rank, (_, num, largest) in enumerate(plans))
            raise PlansDiffer(f"ranks would capture other sizes than each other ({told}); give all one configuration")

    def wait_for_all(self) -> None:
        """A capture holds no collective that another rank has not reached.  Raises AnotherRankFailed instead of going
        on alone."""
        if self._comm.size > 1 and self.num_agreeing(True) < self._comm.size:
            raise AnotherRankFailed("another rank failed")

    def num_agreeing(self, yes: bool) -> int:
        """How many ranks say yes; all of them must ask."""
        vote = torch.full((1,), int(yes), dtype=torch.float32, device=self._where)
        return round(self._comm.all_reduce(vote).item())

    def _bar(self, what: str, sizes: Sequence[int], progress: bool) -> Iterator[int]:
        """The sizes, with those that are left and the memory on a progress bar."""
        off = None if progress else True  # None: where there is no terminal
        with tqdm(sizes, desc=what, unit="size", disable=off) as bar:
            for size in bar:
                memory = self._device.memory()
                bar.set_postfix_str(
                    f"size {size}, {memory.reserved_bytes / 1e9:.1f} GB used, {memory.free_bytes / 1e9:.1f} GB free"
                )
                yield size


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """No garbage collection inside; afterwards everything is as it was.

    In the middle of a capture one would free tensors at a moment nobody chose, and walk every object of the process for
    each of hundreds of captures: others measured 12 s of capture becoming 2 s without it."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # what the captures have left behind holds graph memory; all that is older is still left out
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


# (up to, in steps of): small batches are common and small sizes are cheap to capture, so that is where they are dense.
TOKEN_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
TOKEN_STEP_BEYOND = 512
# A batch of 1 to 8 pays for every padded row; from there on a row costs less than the step it is padded to.
SMALL_BATCHES = (1, 2, 3, 4, 6, 8)
ROW_STEPS = ((64, 8), (256, 16), (512, 32))
ROW_STEP_BEYOND = 64


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Rows of a captured decode step, ascending; the last one is ``largest``."""
    return _capped([*SMALL_BATCHES, *_ladder(SMALL_BATCHES[-1], ROW_STEPS, ROW_STEP_BEYOND, largest)], largest)


def piecewise_sizes(largest: int) -> tuple[int, ...]:
    """Tokens of a captured step with prefill, ascending; the last one is ``largest``."""
    return _capped(_ladder(0, TOKEN_STEPS, TOKEN_STEP_BEYOND, largest), largest)


def round_up(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``count``; None past the largest."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def _ladder(start: int, steps: Sequence[tuple[int, int]], step_beyond: int, largest: int) -> list[int]:
    """Past ``start`` up to ``largest``, in the step of the range that each size lies in."""
    sizes: list[int] = []
    for last, step in (*steps, (largest, step_beyond)):
        sizes += range(start + step, min(last, largest) + 1, step)
        start = max(start, last)
    return sizes


def _capped(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Without those past ``largest``, and with it: every count up to it must have a size."""
    return (*(size for size in sizes if size < largest), largest)
