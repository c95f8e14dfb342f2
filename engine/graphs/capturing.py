"""How captures are done: in which order, together with other ranks, with what on the screen, and what a failure says.

Owns: that procedure, the same for every kind of graph.  Does not know: what is captured.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tqdm import tqdm

from engine.errors import GraphError
from engine.graphs.device import GraphDevice
from engine.graphs.gc_freeze import frozen_garbage
from engine.layers.comm import Comm

log = logging.getLogger(__name__)


class AnotherRankFailed(GraphError):
    """A vote has said so: this rank votes no more."""


class Capturing:
    """One rank's.  where: a tensor's device, to vote on with the other ranks.

    descending, rehearsal: False only to measure what they are good for, see ``benchmarks/bench_graphs.py``.
    """

    def __init__(
        self,
        device: GraphDevice,
        comm: Comm,
        where: torch.device,
        *,
        descending: bool = True,
        rehearsal: bool = True,
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
        with tqdm(sizes, desc=what, unit="size", disable=not progress) as bar:
            for size in bar:
                memory = self._device.memory()
                bar.set_postfix_str(
                    f"size {size}, {memory.reserved_bytes / 1e9:.1f} GB used, {memory.free_bytes / 1e9:.1f} GB free"
                )
                yield size
