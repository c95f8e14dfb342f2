"""A run of the model as a row of graphs with eager work between them.

A capture runs the model once.  Wherever something must not be captured (attention, whose work depends on lengths that
the host knows; a collective that cannot be recorded; any operation that a plugin names) the capture ends, the graph
so far is replayed, the eager body runs on what the graph has computed, and the next capture begins.  A replay does the
same again without the model's Python: graph, body, graph, body, graph.

Owns: where one graph ends and the next begins, the buffers that eager results are written to.
Does not know: models, attention, which sizes there are.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from engine.graphs.device import GraphDevice, Pool


@dataclass(frozen=True, slots=True)
class Recording:
    """One size, captured.

    parts: graphs and eager bodies in their order.  result: what the run returns, overwritten by every replay and by
    replays of other recordings of the pool, so it is to be used up before those.  breaks: how many there are of each
    kind.
    """

    size: int
    parts: tuple[Callable[[], None], ...]
    result: Tensor
    breaks: Mapping[str, int]

    def replay(self) -> Tensor:
        """Run all parts on what the input buffers hold now."""
        for part in self.parts:
            part()
        return self.result


class SegmentRecorder:
    """Breaks captures.  One for each rank, shared by everything that must not be captured.

    num_tokens: how many rows of the run at hand are no padding; eager bodies read it at every replay.
    """

    def __init__(self, device: GraphDevice, pool: Pool, named: Sequence[str] = ()) -> None:
        """named: see ``break_at``."""
        self.named: tuple[str, ...] = ()
        self.num_tokens = 0
        self.size = 0
        self._device = device
        self._pool = pool
        self._named: _NamedBreaks | None = None
        self._parts: list[Callable[[], None]] | None = None
        self._breaks: Counter[str] = Counter()
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self.break_at(named)

    def use(self, pool: Pool) -> None:
        """Capture into another pool from now on; what has been recorded so far is not used any more."""
        self._pool = pool
        self._outputs.clear()

    def break_at(self, operations: Sequence[str]) -> None:
        """Operations that are not to be captured from now on, as torch spells them: 'library::operation'."""
        self.named = tuple(operations)
        self._named = _NamedBreaks(self, frozenset(operations)) if operations else None

    @property
    def recording(self) -> bool:
        """Whether a run is being recorded, of which captures are parts."""
        return self._parts is not None

    def record(self, size: int, run: Callable[[], Tensor]) -> Recording:
        """Capture one run of ``size`` rows.  Its result is valid at once: every part has run when this returns.

        ``run`` must have run outside a capture before, on the capturing stream: kernels and libraries load then.
        After a failure nothing is left of it.
        """
        assert self._parts is None, "a run is being recorded already"
        self._parts, self._breaks, self.size = [], Counter(), size
        try:
            self._begin_graph()
            # Weak inside the capture: from here on the memory of the result is the next, smaller size's as well.
            result = self._device.weak(run())
            self._end_graph()
            return Recording(size, tuple(self._parts), result, self._breaks)
        except BaseException:
            if self._named is not None:
                self._named.leave()
            self._device.abandon()
            raise
        finally:
            self._parts = None

    def run(self, kind: str, body: Callable[[], None]) -> None:
        """Run ``body`` eagerly, here and at every replay; outside a recording that is a plain call.

        It must find its inputs by weak references, and leave its results where it found them, or in a buffer.
        """
        if self._parts is None:
            body()
            return
        self._end_graph()
        body()
        self._resume(kind, body)

    def call(self, kind: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``function`` returns, run eagerly here and at every replay, on all rows: padding too.

        What it makes is copied to buffers that all sizes share; what it changes in place stays where it is.
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
                # The same memory as an argument, which the model must keep: ``one`` itself is weak.
                results[index] = owner.as_strided(one.size(), one.stride(), one.storage_offset())
            else:
                results[index] = buffers[index] = self._buffer((place, index), one)
        self._resume(kind, partial(_call_into, buffers, function, weak_args, weak_kwargs))
        return tree_unflatten(results, layout)

    def weak(self, tensor: Tensor) -> Tensor:
        """How an eager body may refer to a tensor of the run: a strong reference would keep the pool's memory."""
        return tensor if self._parts is None else self._device.weak(tensor)

    def _begin_graph(self) -> None:
        self._device.begin_capture(self._pool, self.size)
        if self._named is not None:
            self._named.enter()

    def _resume(self, kind: str, body: Callable[[], None]) -> None:
        """Go on capturing behind a body that has run."""
        assert self._parts is not None
        self._parts.append(body)
        self._breaks[kind] += 1
        self._begin_graph()

    def _end_graph(self) -> None:
        assert self._parts is not None
        if self._named is not None:
            self._named.leave()
        graph = self._device.end()
        # Work that is recorded is not done: without this the body would get uninitialised memory.
        graph.replay()
        self._parts.append(graph.replay)

    def _buffer(self, place: tuple[int, int], made: Tensor) -> Tensor:
        """The memory for one eager result, with its first value.  Sizes come in descending order: the first is enough.

        One for each place of a run, since nobody knows how long a result is read.
        """
        buffer = self._outputs.get(place)
        if buffer is None or buffer.dtype != made.dtype or buffer.numel() < made.numel():
            buffer = self._outputs[place] = self._device.buffer((made.numel(),), made.dtype)
        return buffer[: made.numel()].view(made.shape).copy_(made)


class _NamedBreaks(TorchDispatchMode):
    """Breaks at operations by their names, wherever in the model they are called.

    Entered anew for each graph, so that whatever a device puts around a capture lies inside.
    """

    def __init__(self, recorder: SegmentRecorder, named: frozenset[str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._named = named
        self._entered = False
        self._handling = False

    def enter(self) -> None:
        """See operations from here on.  While one is handled torch has this mode aside and brings it back by itself."""
        if not self._handling:
            self.__enter__()
            self._entered = True

    def leave(self) -> None:
        """The opposite; does nothing outside."""
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
    """Of the whole storage, whatever part of it the tensor is."""
    return tensor.untyped_storage().data_ptr()
