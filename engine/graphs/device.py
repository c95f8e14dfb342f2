"""The seam between capturing and the device that captures: what the rest of this package needs of CUDA, and no more.

Owns: GraphDevice and its CUDA form.  Does not know: models, what is captured, in which order.
``tests/graphs/recording.py`` is the same seam on a CPU: it records operations and replays them.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.execution.captured_steps import Event
from engine.host.memory import available_bytes

Pool = Any  # an opaque handle: memory that graphs take their tensors from, and may share


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """free_bytes: of the whole device.  reserved_bytes: what this process has taken from it, used or not."""

    free_bytes: int
    reserved_bytes: int


class Graph(Protocol):
    """What a capture leaves behind."""

    def replay(self) -> None:
        """Run it again on the same addresses; queued on the current stream."""
        ...


class GraphDevice(Protocol):
    """Captures work of the calling thread into graphs.

    Graphs of one pool may share its memory: a tensor that nobody holds any more when a capture goes on is
    overwritten at replay.  So graphs of one pool are replayed one after the other, on one stream.

    captures: whether it can; if not, only ``buffer``, ``stream``, ``is_capturing`` and ``memory`` are of use.

    What the host and the device tell each other goes through ``host``, ``copy`` and ``event``, where it can be counted.
    """

    captures: bool

    def pool(self) -> Pool:
        """New memory for graphs."""
        ...

    def drop(self, pool: Pool) -> None:
        """Give the memory of a pool back; nobody holds a graph of it any more."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that stay where they are, outside every pool: what graphs and eager work hand each other."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """The stream that captures happen on: after all work queued before, and before all that is queued after."""
        ...

    def begin_capture(self, pool: Pool, size: int) -> None:
        """From here on work is recorded and not done.  Inside ``stream()``.  size: rows that are captured."""
        ...

    def end(self) -> Graph:
        """Stop recording."""
        ...

    def abandon(self) -> None:
        """Stop recording after a failure and forget what was recorded; does nothing outside a capture.  Raises nothing,
        which would hide that failure."""
        ...

    def discard(self) -> None:
        """Every graph is gone, whoever still refers to it, and nothing is replayed any more."""
        ...

    def is_capturing(self) -> bool:
        """Whether work of this thread is being recorded."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """The same memory, not kept: the pool may give it to others."""
        ...

    def memory(self) -> DeviceMemory:
        """How much there is and how much is taken."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that ``run`` takes at its peak, beside what is taken now."""
        ...

    def trim(self) -> None:
        """Wait until the device is idle and give back what nobody uses, so that ``memory`` tells what is needed."""
        ...

    def host(self, num_bytes: int) -> Tensor:
        """uint8 memory of the host that ``copy`` can reach without waiting; what is in it is not defined."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between ``host`` memory and the device's."""
        ...

    def event(self) -> Event:
        """A new one, which counts as reached until it is recorded."""
        ...


class CudaDevice:
    """See ``GraphDevice``.  One side stream for all captures, so that they can reuse each other's memory."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool: Pool = None
        self._refused: list[torch.cuda.CUDAGraph] = []
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._keepers: dict[Pool, tuple[Graph, Tensor]] = {}

    def pool(self) -> Pool:
        pool = torch.cuda.graph_pool_handle()
        # A pool dies with its last graph, and no capture may use it again: one that does next to nothing keeps it.
        nothing = self.buffer((1,), torch.float32)
        with self.stream():
            nothing.add_(0)  # loads the kernel, which must not happen in a capture
            try:
                self.begin_capture(pool, 1)
                nothing.add_(0)
                self._keepers[pool] = (self.end(), nothing)
            except BaseException:
                self.abandon()
                raise
        return pool

    def drop(self, pool: Pool) -> None:
        del self._keepers[pool]
        self.trim()

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    @contextmanager
    def stream(self) -> Iterator[None]:
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def begin_capture(self, pool: Pool, size: int) -> None:
        assert self._graph is None, "a capture is under way"
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool  # before: a beginning that fails may be half made
        # Other threads of the process may allocate memory meanwhile; only this one is held to the rules.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        assert self._graph is not None, "no capture is under way"
        self._graph.capture_end()
        graph, self._graph = self._graph, None
        self._graphs.add(graph)
        return graph

    def abandon(self) -> None:
        if self._graph is None:
            return
        graph, self._graph = self._graph, None
        try:
            graph.capture_end()
        except RuntimeError:
            # CUDA refuses to end a capture that broke its rules, and torch then leaves its allocators in it.
            try:
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            except RuntimeError:
                return  # it had ended, and only instantiating failed: the graph itself gives its share of the pool back
            torch._C._cuda_releasePool(self._device.index, self._pool)
            # That of page-locked memory cannot be reached from here.  It goes on asking this graph whether a stream is
            # its own, which no stream ever is again.
            self._refused.append(graph)

    def discard(self) -> None:
        """See ``GraphDevice``.  One that runs is freed when it is done."""
        with torch.cuda.device(self._device):
            for graph in self._graphs:
                graph.reset()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def weak(self, tensor: Tensor) -> Tensor:
        return weak_reference(tensor)

    def memory(self) -> DeviceMemory:
        free, _ = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(free, torch.cuda.memory_reserved(self._device))

    def peak(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - int(before)

    def trim(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return torch.cuda.Event()


class HostDevice:
    """See ``GraphDevice``.  A CPU has no graphs: what would be captured runs directly."""

    captures = False

    def pool(self) -> Pool:
        """There is none."""
        return None

    def drop(self, pool: Pool) -> None:
        """There is none."""

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_capture(self, pool: Pool, size: int) -> None:
        """Not here."""
        raise AssertionError("a CPU has no graphs to capture")

    def end(self) -> Graph:
        """Not here."""
        raise AssertionError("a CPU has no graphs to capture")

    def abandon(self) -> None:
        """See ``GraphDevice``."""

    def discard(self) -> None:
        """There are none."""

    def is_capturing(self) -> bool:
        return False

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor

    def memory(self) -> DeviceMemory:
        return DeviceMemory(available_bytes(), 0)

    def peak(self, run: Callable[[], object]) -> int:
        """Not known here: a pool on a CPU takes its memory as it is written."""
        return 0

    def trim(self) -> None:
        """See ``GraphDevice``."""

    def host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def event(self) -> Event:
        """Not here: nothing is ever queued."""
        raise AssertionError("a CPU has no queue to wait for")


def device_for_graphs(device: torch.device) -> GraphDevice:
    """What captures on a device, if anything does."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def weak_reference(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it: use it only while somebody else guarantees the memory."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())
