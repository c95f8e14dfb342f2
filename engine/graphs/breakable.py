"""A run of the model as a sequence of graphs with eager work between them.

A capture runs the model once.  At an operation that must not be captured (attention, whose work depends on lengths that
the host knows; a collective that cannot be recorded; any operation that a plugin names) the capture ends, the graph
so far is replayed, the eager body runs on its results, and the next capture begins.  A replay does the same without the
model's Python: graph, body, graph, body, graph.

Owns: where one graph ends and the next begins, the buffers for eager results.
Does not know: models, attention, which sizes there are.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from engine.graphs.device import GraphDevice, Pool


@dataclass(frozen=True, slots=True)
class GraphRecording:
    """The capture of one size.

    parts: graphs and eager bodies in order.
    result: the run's result.  Every replay of this recording, and of others of the pool, overwrites it.
    breaks: number of breaks of each kind.
    branches: what may follow ``parts``, by name.
    """

    size: int
    parts: tuple[Callable[[], None], ...]
    result: Tensor
    breaks: Mapping[str, int]
    branches: Mapping[str, Sequence[Callable[[], None]]] = field(default_factory=dict)

    def replay(self, branch: str = "") -> Tensor:
        """Run all parts on the current content of the input buffers, then those of a branch, if there is one."""
        for part in self.parts:
            part()
        for part in self.branches.get(branch, ()):
            part()
        return self.result


class SegmentRecorder:
    """Records runs and breaks their captures.  A rank has one, shared by everything that must not be captured.

    num_tokens: number of the current run's rows that are not padding; eager bodies read it at every replay.
    """

    def __init__(self, device: GraphDevice, pool: Pool, named: Sequence[str] = ()) -> None:
        """Start without a recording.  named: the operations for ``break_at``."""
        self.named: tuple[str, ...] = ()
        self.num_tokens = 0
        self.size = 0
        self._device = device
        self._pool = pool
        self._named: _NamedBreaks | None = None
        self._parts: list[Callable[[], None]] | None = None
        self._breaks: Counter[str] = Counter()
        self._branches: dict[str, list[Callable[[], None]]] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self.break_at(named)

    def use(self, pool: Pool) -> None:
        """Capture into another pool from now on; earlier recordings are not used any more."""
        self._pool = pool
        self._outputs.clear()

    def break_at(self, operations: Sequence[str]) -> None:
        """Set the operations that are not captured from now on, in torch's spelling: 'library::operation'."""
        self.named = tuple(operations)
        self._named = _NamedBreaks(self, frozenset(operations)) if operations else None

    @property
    def recording(self) -> bool:
        """Whether a run is being recorded."""
        return self._parts is not None

    def record(self, size: int, run: Callable[[], Tensor]) -> GraphRecording:
        """Capture one run of ``size`` rows.  Its result is valid at once: every part has run when this returns.

        ``run`` must have run before, outside a capture, on the capturing stream: kernels and libraries load then.
        After a failure nothing of the recording remains.
        """
        assert self._parts is None, "a run is being recorded already"
        trunk: list[Callable[[], None]] = []
        self._parts, self._breaks, self._branches, self.size = trunk, Counter(), {}, size
        try:
            self._begin_graph()
            # Weak inside the capture: the next, smaller size shares the memory of the result.
            result = self._device.weak(run())
            self._end_graph()
            return GraphRecording(size, tuple(trunk), result, self._breaks, self._branches)
        except BaseException:
            if self._named is not None:
                self._named.leave()
            self._device.abandon()
            raise
        finally:
            self._parts = None

    def branch(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` as a graph of its own, which a replay runs if it is given the name.

        It may read what the run has made, which must be kept until the last branch has returned.  Nothing but branches
        follows one."""
        if self._parts is not None:
            self._end_graph()
            self._parts = self._branches[name] = []
            self._begin_graph()
        work()

    def run(self, kind: str, body: Callable[[], None]) -> None:
        """Run ``body`` eagerly, now and at every replay; outside a recording, just call it.

        The body must refer to its inputs weakly, and write its results in place or to a buffer.
        """
        if self._parts is None:
            body()
            return
        self._end_graph()
        body()
        self._resume(kind, body)

    def call(self, kind: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``function``, run eagerly now and at every replay, on all rows, padding included.

        New results are copied to buffers that all sizes share; results in an argument's memory stay there.
        """
        if self._parts is None:
            return function(*args, **kwargs)
        place = self._breaks.total()
        weak_args, weak_kwargs = tree_map_only(Tensor, self.weak, (tuple(args), dict(kwargs)))
        self._end_graph()
        results, layout = tree_flatten(function(*weak_args, **weak_kwargs))
        owners = {_address(one): one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        buffers: list[Tensor | None] = [None] * len(results)
        for index, one in enumerate(results):
            if not isinstance(one, Tensor):
                continue
            if (owner := owners.get(_address(one))) is not None:
                # The same memory as an argument.  Return a view of the argument itself, since ``one`` is weak.
                results[index] = owner.as_strided(one.size(), one.stride(), one.storage_offset())
            else:
                results[index] = buffers[index] = self._buffer((place, index), one)
        self._resume(kind, partial(_call_into, buffers, function, weak_args, weak_kwargs))
        return tree_unflatten(results, layout)

    def weak(self, tensor: Tensor) -> Tensor:
        """Return a weak reference for an eager body; a strong one would keep the pool's memory."""
        return tensor if self._parts is None else self._device.weak(tensor)

    def _begin_graph(self) -> None:
        self._device.begin_capture(self._pool, self.size)
        if self._named is not None:
            self._named.enter()

    def _resume(self, kind: str, body: Callable[[], None]) -> None:
        """Continue the capture after a body that has run."""
        assert self._parts is not None
        self._parts.append(body)
        self._breaks[kind] += 1
        self._begin_graph()

    def _end_graph(self) -> None:
        assert self._parts is not None
        if self._named is not None:
            self._named.leave()
        graph = self._device.end()
        # Recorded work has not run yet: without a replay the body would read uninitialised memory.
        graph.replay()
        self._parts.append(graph.replay)

    def _buffer(self, place: tuple[int, int], made: Tensor) -> Tensor:
        """Return the memory for one eager result, with its first value.  The largest size comes first and allocates it.

        Each place in a run has its own, since it is unknown for how long a result is read.
        """
        buffer = self._outputs.get(place)
        if buffer is None or buffer.dtype != made.dtype or buffer.numel() < made.numel():
            buffer = self._outputs[place] = self._device.buffer((made.numel(),), made.dtype)
        return buffer[: made.numel()].view(made.shape).copy_(made)


class _NamedBreaks(TorchDispatchMode):
    """Breaks captures at operations by name, wherever the model calls them.

    Entered anew for each graph, inside of any mode that the device enters for a capture.
    """

    def __init__(self, recorder: SegmentRecorder, named: frozenset[str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._named = named
        self._entered = False
        self._handling = False

    def enter(self) -> None:
        """Intercept operations from here on.  While one is handled, torch itself suspends and restores this mode."""
        if not self._handling:
            self.__enter__()
            self._entered = True

    def leave(self) -> None:
        """Stop intercepting; no effect if not entered."""
        if self._entered and not self._handling:
            self._entered = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in self._named:
            return func(*args, **(kwargs or {}))
        self._handling = True
        try:
            return self._recorder.call(name, func, args, kwargs or {})
        finally:
            self._handling = False


def _call_into(
    buffers: Sequence[Tensor | None], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    for buffer, one in zip(buffers, tree_flatten(function(*args, **kwargs))[0], strict=True):
        if buffer is not None:
            buffer.copy_(one)


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's whole storage."""
    return tensor.untyped_storage().data_ptr()
