"""The interface between capturing and the device that captures: the operations of CUDA that this package uses.

Owns: GraphDevice and its CUDA form.  Does not know: models, the captured work and its order.
``tests/graphs/recording.py`` implements the same interface on a CPU: it records operations and replays them.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.execution.captured_steps import StepEvent
from engine.host.memory import available_bytes

Pool = Any  # an opaque handle of memory that graphs allocate tensors from, and may share


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device.  free_bytes: of the whole device.  reserved_bytes: taken by this process, used or not."""

    free_bytes: int
    reserved_bytes: int


class Graph(Protocol):
    """The result of a capture."""

    def replay(self) -> None:
        """Queue the captured work on the current stream again, on the same addresses."""
        ...


class GraphDevice(Protocol):
    """Captures work of the calling thread into graphs.

    Graphs of one pool share its memory: a tensor that is no longer referenced when a capture continues may be
    overwritten at replay.  So graphs of one pool are replayed one after the other, on one stream.

    captures: whether the device can capture; if not, only ``buffer``, ``stream``, ``is_capturing`` and ``memory`` are
    useful.  All traffic between host and device goes through ``host``, ``copy`` and ``event``, where it can be counted.
    """

    captures: bool

    def pool(self) -> Pool:
        """Return new memory for graphs."""
        ...

    def drop(self, pool: Pool) -> None:
        """Free the memory of a pool; no graph of it may be referenced any more."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros at a fixed address outside every pool: memory that graphs and eager work share."""
        ...

    def stream(self) -> AbstractContextManager[None]:
        """Enter the capturing stream, which is ordered after earlier work and before later work of other streams."""
        ...

    def begin_capture(self, pool: Pool, size: int) -> None:
        """Record work from here on, without running it.  Call it inside ``stream()``.  size: rows of the run."""
        ...

    def end(self) -> Graph:
        """Stop recording and return the graph."""
        ...

    def abandon(self) -> None:
        """Stop recording after a failure and forget what was recorded; no effect outside a capture.  Raises nothing, as
        that would hide the failure."""
        ...

    def discard(self) -> None:
        """Destroy every graph, even if it is still referenced; afterwards nothing is replayed."""
        ...

    def is_capturing(self) -> bool:
        """Return whether work of this thread is being recorded."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory that does not keep it: the pool may reuse it."""
        ...

    def memory(self) -> DeviceMemory:
        """Return how much memory is free and how much is taken."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """Run and return the peak of bytes taken by it, in addition to what is taken now."""
        ...

    def trim(self) -> None:
        """Wait until the device is idle and free unused memory, so that ``memory`` returns what is needed."""
        ...

    def host(self, num_bytes: int) -> Tensor:
        """Return uninitialised uint8 memory of the host that ``copy`` reaches without waiting."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between ``host`` memory and the device's."""
        ...

    def event(self) -> StepEvent:
        """Return a new event, which counts as reached until it is recorded."""
        ...


class CudaDevice:
    """The ``GraphDevice`` of an NVIDIA GPU.  All captures use one side stream, so that they can share memory."""

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
        # A pool dies with its last graph and cannot be used again, so a graph that does almost nothing keeps it alive.
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
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool  # set first: a failed start may have begun the capture
        # Other threads of the process may allocate memory during a capture; only this one must follow its rules.
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
            # CUDA refuses to end a capture that broke its rules, and torch's allocators then stay in capture mode.
            try:
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            except RuntimeError:
                return  # the capture had ended, and only instantiation failed: the graph frees its share of the pool
            torch._C._cuda_releasePool(self._device.index, self._pool)
            # The allocator of page-locked memory cannot be reset from here.  It keeps asking this graph whether a
            # stream is being captured, which is never true again, so the graph is kept.
            self._refused.append(graph)

    def discard(self) -> None:
        """Destroy every graph; a running one is freed when it is done."""
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

    def event(self) -> StepEvent:
        return torch.cuda.Event()


class HostDevice:
    """The ``GraphDevice`` of a CPU, which has no graphs: work runs directly."""

    captures = False

    def pool(self) -> Pool:
        """Return None: there is no pool."""
        return None

    def drop(self, pool: Pool) -> None:
        """Do nothing: there is no pool."""

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_capture(self, pool: Pool, size: int) -> None:
        """Raise AssertionError."""
        raise AssertionError("a CPU has no graphs to capture")

    def end(self) -> Graph:
        """Raise AssertionError."""
        raise AssertionError("a CPU has no graphs to capture")

    def abandon(self) -> None:
        """Do nothing: there are no captures."""

    def discard(self) -> None:
        """Do nothing: there are no graphs."""

    def is_capturing(self) -> bool:
        return False

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor

    def memory(self) -> DeviceMemory:
        return DeviceMemory(available_bytes(), 0)

    def peak(self, run: Callable[[], object]) -> int:
        """Return 0: the peak is unknown, as a pool on a CPU takes its memory as it is written."""
        return 0

    def trim(self) -> None:
        """Do nothing."""

    def host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def event(self) -> StepEvent:
        """Raise AssertionError: nothing is ever queued."""
        raise AssertionError("a CPU has no queue to wait for")


def device_for_graphs(device: torch.device) -> GraphDevice:
    """Return the interface to the device."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def weak_reference(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that does not keep it; the memory must be kept by other means."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())
