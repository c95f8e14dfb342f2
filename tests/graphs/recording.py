"""CUDA graphs on a CPU: operations are recorded with the tensors they touched, and a replay runs them on those again.

What it keeps of the real thing: addresses and Python values are those of the capture; work inside a capture is not
done (what it wrote is undone, what it made is poisoned); a tensor that nobody holds is overwritten by later captures'
replays, since graphs of a pool share memory.  What it forbids: reading a tensor that is neither static nor made in this
run, reading values on the host, captures out of order or in different pools, static tensors that move.  What it does
not see is the inside of an operation that is written in Python.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from engine.graphs.device import DeviceMemory

HOST_READS = {
    *(Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}


class RecordingError(AssertionError):
    """Something that would fail, or go wrong unnoticed, with real graphs."""


@dataclass
class Memory:
    """One storage that a capture has made.  died: the clock when the last tensor over it was dropped."""

    size: int
    storage: torch.UntypedStorage
    dtype: torch.dtype
    living: int = 0
    died: int | None = None


@dataclass
class Operation:
    """func with the tensors it saw, without keeping them for the pool.  made: results with memory of their own."""

    func: Any
    args: Any
    kwargs: Any
    made: list[tuple[int, Tensor]]


@dataclass
class RecordedEvent:
    """See ``Event``.  The double does everything at once, so it is always reached."""

    device: "RecordingDevice"

    def record(self) -> None:
        self.device.events += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.device.syncs += 1


@dataclass
class RecordedGraph:
    """See ``Graph``.  statics, touched: addresses of static tensors, and of memory of captures, that it works on."""

    device: "RecordingDevice"
    size: int
    began: int
    operations: list[Operation] = field(default_factory=list)
    statics: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    last_made: int = 0
    discarded: bool = False

    def replay(self) -> None:
        """Run every operation on the memory it was recorded with."""
        if self.device.is_capturing():
            raise RecordingError("a graph is replayed inside a capture")
        if self.discarded:
            raise RecordingError("a graph is replayed that was given up")
        for address in self.statics:
            self.device.check_static(address)
        self.device.touched |= self.touched
        self.device.overwrite_dead(self.began)
        for operation in tuple(self.operations):
            results = tree_flatten(operation.func(*operation.args, **operation.kwargs))[0]
            for index, made in operation.made:
                made.copy_(results[index])
        self.device.overwrite_dead(self.last_made)
        self.device.replays.append(self.size)


class RecordingDevice:
    """See ``GraphDevice``.

    descending: every capture must be of at most the size of the one before; else only the first must be the largest.
    replays: sizes of the graphs that were replayed, one entry for each.
    copies_in, copies_out: bytes of each copy to and from the device.  events, syncs: recorded, waited for.
    touched: addresses of memory of captures that may hold something else than poison.
    """

    captures = True

    def __init__(self, descending: bool = True) -> None:
        self.graphs: list[RecordedGraph] = []
        self.replays: list[int] = []
        self.clock = 0
        self.memories: dict[int, Memory] = {}
        self.touched: set[int] = set()
        self._descending = descending
        self.statics: dict[int, weakref.ref[Tensor]] = {}
        self._opaque: set[int] = set()
        self._recorder: _Recorder | None = None
        self.pools: list[object] = []
        self.dropped: list[list[RecordedGraph]] = []
        self._streams = 0
        self.copies_in: list[int] = []
        self.copies_out: list[int] = []
        self.events = 0
        self.syncs = 0
        self._hosts: list[Tensor] = []
        self.peak_bytes = 0
        self.trims = 0

    def register(self, *tensors: Tensor) -> None:
        """Declare tensors static: weights, the KV pool."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                self._opaque.add(id(tensor))
            elif tensor.numel():
                self.statics[address_of(tensor)] = weakref.ref(tensor)

    def pool(self) -> object:
        return object()

    def drop(self, pool: object) -> None:
        """What was captured into it was a trial, or has failed: what is captured from now on begins anew."""
        if any(one is not pool for one in self.pools):
            raise RecordingError("a pool is dropped while another one has graphs")
        self.dropped.append(self.graphs)
        self.graphs, self.pools = [], []

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer = torch.zeros(shape, dtype=dtype)
        self.register(buffer)
        return buffer

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._streams += 1
        try:
            # Around all captures and not around each: one may end inside a call that such a mode has seen coming.
            with _HostReads(self):
                yield
        finally:
            self._streams -= 1
            if self.is_capturing():
                raise RecordingError("the capturing stream was left inside a capture")

    def begin_capture(self, pool: object, size: int) -> None:
        if self._recorder is not None:
            raise RecordingError("a capture begins inside another one")
        if not self._streams:
            raise RecordingError("captures need a stream of their own")
        if pool not in self.pools and self.pools:
            raise RecordingError("this graph would have a pool of its own")
        sizes = [graph.size for graph in self.graphs]
        if sizes and size > (sizes[-1] if self._descending else sizes[0]):
            raise RecordingError(f"{size} is captured after {sizes[-1]}: memory of smaller sizes cannot be reused")
        self.pools.append(pool)
        self.clock += 1
        self._recorder = _Recorder(self, RecordedGraph(self, size, self.clock))
        self._recorder.__enter__()

    def end(self) -> RecordedGraph:
        if self._recorder is None:
            raise RecordingError("no capture to end")
        recorder, self._recorder = self._recorder, None
        recorder.leave()
        self.graphs.append(recorder.graph)
        return recorder.graph

    def abandon(self) -> None:
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.leave()

    def discard(self) -> None:
        for graph in self.graphs:
            graph.discarded = True

    def is_capturing(self) -> bool:
        return self._recorder is not None

    def weak(self, tensor: Tensor) -> Tensor:
        return alias(tensor)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 30, sum(one.storage.nbytes() for one in self.memories.values()))

    def peak(self, run: Callable[[], object]) -> int:
        run()
        return self.peak_bytes

    def trim(self) -> None:
        self.trims += 1

    def host(self, num_bytes: int) -> Tensor:
        self._hosts.append(torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
        return self._hosts[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.is_capturing():
            raise RecordingError("a copy between host and device inside a capture")
        hosts = {address_of(one) for one in self._hosts}
        inwards = address_of(source) in hosts
        if inwards == (address_of(target) in hosts):
            raise RecordingError("one side of a copy must be the host's page-locked memory, and one the device's")
        (self.copies_in if inwards else self.copies_out).append(source.nbytes)
        target.copy_(source)

    def event(self) -> RecordedEvent:
        return RecordedEvent(self)

    def is_static(self, tensor: Tensor) -> bool:
        """Whether it was declared static."""
        if tensor.layout is not torch.strided:
            return id(tensor) in self._opaque
        owner = self.statics.get(address_of(tensor))
        return owner is not None and owner() is not None

    def check_static(self, address: int) -> None:
        """Raise if a static tensor is gone or somewhere else."""
        tensor = self.statics[address]()
        if tensor is None or address_of(tensor) != address:
            raise RecordingError("a static tensor has moved since the capture: the graph reads its old address")

    def made(self, tensor: Tensor, size: int) -> None:
        """Note that a capture of ``size`` made this tensor's memory, or a view of it."""
        address = address_of(tensor)
        if address not in self.memories:
            self.clock += 1
            self.memories[address] = Memory(size, tensor.untyped_storage(), tensor.dtype)
        self.touched.add(address)
        memory = self.memories[address]
        memory.living += 1
        weakref.finalize(tensor, self._drop, memory).atexit = False

    def overwrite_dead(self, before: int) -> None:
        """Poison memory that was free when the clock stood there: a replay has given it to others by then."""
        for address in tuple(self.touched):
            memory = self.memories[address]
            if memory.died is not None and memory.died < before:
                poison(memory.storage, memory.dtype)
                self.touched.remove(address)

    def _drop(self, memory: Memory) -> None:
        memory.living -= 1
        if not memory.living:
            memory.died = self.clock


class _Recorder(TorchDispatchMode):
    """Sees every operation of a capture."""

    def __init__(self, device: RecordingDevice, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self._device = device
        self._own: set[int] = set()
        self._saved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def leave(self) -> None:
        """Undo what the capture did: captured work is recorded, not done."""
        self.__exit__(None, None, None)
        for storage, before in self._saved:
            storage.copy_(before)
        for address in self._own:
            memory = self._device.memories[address]
            poison(memory.storage, memory.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        forbid_host_reads(func, args)
        inputs = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        for tensor in inputs:
            self._check(func, tensor)
        for tensor in written(func, args, kwargs):
            self._save(tensor)
        results = func(*args, **kwargs)
        known = {address_of(one) for one in inputs if one.layout is torch.strided}
        made = []
        for index, one in enumerate(tree_flatten(results)[0]):
            if not isinstance(one, Tensor) or not one.numel():
                continue
            if address_of(one) not in known:
                made.append((index, alias(one)))
                self._own.add(address_of(one))
            if not self._device.is_static(one):
                self._device.made(one, self.graph.size)
                self.graph.touched.add(address_of(one))
        if made:
            self.graph.last_made = self._device.clock
        weak_args, weak_kwargs = tree_map_only(Tensor, alias, (args, kwargs))
        self.graph.operations.append(Operation(func, weak_args, weak_kwargs, made))
        return results

    def _check(self, func: Any, tensor: Tensor) -> None:
        if self._device.is_static(tensor):
            if tensor.layout is torch.strided:
                self.graph.statics.add(address_of(tensor))
            return
        memory = self._device.memories.get(address_of(tensor)) if tensor.numel() else None
        if tensor.numel() and (memory is None or memory.size != self.graph.size):
            whose = "outside the captures" if memory is None else f"by the run of {memory.size}"
            raise RecordingError(
                f"{func} reads a tensor {tuple(tensor.shape)} that was made {whose}: at replay it will be stale"
            )
        if memory is not None:
            self.graph.touched.add(address_of(tensor))

    def _save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._own or any(one.data_ptr() == storage.data_ptr() for one, _ in self._saved):
            return
        self._saved.append((storage, storage.clone()))


class _HostReads(TorchFunctionMode):
    """Sees the methods that hand values to Python, some of which are no operations."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.is_capturing() and func in HOST_READS:
            raise RecordingError(f"{getattr(func, '__name__', func)} reads values on the host inside a capture")
        return func(*args, **(kwargs or {}))


def forbid_host_reads(func: Any, args: Any) -> None:
    """Raise for an operation whose result, or whose result's shape, depends on values."""
    masks = [one for one in tree_flatten(args[1:])[0] if isinstance(one, Tensor) and one.dtype == torch.bool]
    by_index = func._schema.name.startswith("aten::index")
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    if (masks and by_index) or (depends and not by_index):
        raise RecordingError(f"{func} needs values on the host inside a capture")


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    values = dict(zip([one.name for one in func._schema.arguments], args, strict=False)) | kwargs
    names = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [one for name in names for one in tree_flatten(values.get(name))[0] if isinstance(one, Tensor)]


def alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, unknown to whoever counts the ones that keep it."""
    if tensor.layout is not torch.strided:
        return tensor
    with torch.utils._python_dispatch._disable_current_modes():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def address_of(tensor: Tensor) -> int:
    """Of the whole storage."""
    return tensor.untyped_storage().data_ptr()


def poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fill memory with what gives nonsense or an error wherever it is used."""
    content = torch.empty(0, dtype=dtype).set_(storage)
    content.fill_(torch.nan if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).min)
