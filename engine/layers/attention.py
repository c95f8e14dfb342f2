"""The interface between a model and an attention kernel: the batch that a step passes, and what a backend must do.

Legend: T new tokens in the step (ragged, packed) · B sequences · D decode rows (the first D of B)
        P page-table width · N query heads · G KV heads · H head size
Owns: the protocols and the batch description.  Does not know: kernels, models, the scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.checkpoints.shape import CHUNKS, LATENTS, LAYER_WINDOWS, SINKS, SOFT_CAP
from engine.layers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention on one rank, known before the pool is allocated.

    scale: factor of the scores.
    window: tokens that a query sees, counted back and including itself; 0 for all.
    first_window_layer: first layer with the window; the layers before it see everything.
    full_layers: layers after ``first_window_layer`` that see everything.
    chunked: whether the window does not move along: a query sees the tokens of its own chunk of ``window`` tokens.
    soft_cap: a score becomes soft_cap * tanh(score / soft_cap), before masks; 0 for none.
    sinks: for each layer a score per query head, [N], that enters the softmax without a value; () for none.
    heads: number and size of the key/value heads of each layer, where layers differ; () for num_kv_heads and head_size,
        which are otherwise those of the widest layers.
    lenders: with ``heads``, the layer whose keys and values each layer reads: itself, or an earlier one.
    latent_size: a value is the first ``latent_size`` numbers of its key and is not stored again; 0 for separate values.

    A backend must declare full_layers, chunked, soft_cap, sinks and latent_size in ``Declaration.supports`` to get
    them.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int = 0
    first_window_layer: int = 0
    full_layers: tuple[int, ...] = ()
    soft_cap: float = 0.0
    sinks: tuple[Tensor, ...] = field(default=(), compare=False)
    latent_size: int = 0
    chunked: bool = False
    heads: tuple[tuple[int, int], ...] = ()
    lenders: tuple[int, ...] = ()

    @property
    def kinds(self) -> list[tuple[list[int], "AttentionSpec"]]:
        """The kinds of layers by heads and window: numbers of the layers of each, and their attention alone.

        If heads do not differ, all layers are of one kind."""
        if not self.heads:
            return [([*range(self.num_layers)], self)]
        by_kind: dict[tuple[int, int, int], list[int]] = {}
        for layer, heads in enumerate(self.heads):
            by_kind.setdefault((*heads, self.window_of(layer)), []).append(layer)
        return [(layers, self._alone(layers, *kind)) for kind, layers in by_kind.items()]

    @property
    def widest(self) -> "AttentionSpec":
        """The attention of the widest layers alone; all of it if layers do not differ."""
        return max((one for _, one in self.kinds), key=lambda one: one.head_size)

    def _alone(self, layers: list[int], num_kv_heads: int, head_size: int, window: int) -> "AttentionSpec":
        return replace(
            self,
            num_layers=len(layers),
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            window=window,
            first_window_layer=0,
            full_layers=(),
            sinks=tuple(self.sinks[layer] for layer in layers) if self.sinks else (),
            heads=(),
            lenders=(),
        )

    @property
    def value_size(self) -> int:
        """Size of a value, and of a head's result."""
        return self.latent_size or self.head_size

    @property
    def needs(self) -> tuple[str, ...]:
        """Names, as in ``Declaration.supports``, of the optional features that this attention uses."""
        there = {
            SOFT_CAP: self.soft_cap,
            SINKS: self.sinks,
            LAYER_WINDOWS: self.full_layers,
            LATENTS: self.latent_size,
            CHUNKS: self.chunked,
        }
        return tuple(name for name, value in there.items() if value)

    def window_of(self, layer: int) -> int:
        """Return the layer's window; 0 if it sees everything."""
        return 0 if layer < self.first_window_layer or layer in self.full_layers else self.window

    def shortened(self, num_layers: int) -> "AttentionSpec":
        """Return the spec of a model with fewer layers that keeps one layer of each kind; trials run on it."""
        num_layers = min(num_layers, self.num_layers)
        first = min(self.first_window_layer, num_layers - 1)
        full_layers = tuple(layer for layer in self.full_layers if layer < num_layers)
        if self.full_layers and not full_layers and not first:
            full_layers = (num_layers - 1,)
        return replace(
            self,
            num_layers=num_layers,
            first_window_layer=first,
            full_layers=full_layers,
            sinks=self.sinks[:num_layers],
        )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step: the decode rows (one query each), then the prefill segments.

    page_table_BP: int32 on the device; entry [b, i] is the page of positions i*page_size ... of sequence b.
        Entries past a sequence's last page are 0 and must not be read as its content.
    lengths_B: int32 on the device; context length including this step's tokens.
    query_starts_B1: int32 [B + 1] on the device; sequence b's queries are rows starts[b]:starts[b+1] of T.
        They are its last ``starts[b+1] - starts[b]`` positions, and attend causally.
    host_lengths, host_query_lengths: int32 [B] numpy copies, so that backends need not read from the device.
    shares: whether decode rows may have pages in common; False only where the host knows that they have none.
    """

    num_decodes: int
    page_table_BP: Tensor
    lengths_B: Tensor
    query_starts_B1: Tensor
    host_lengths: npt.NDArray[np.int32]
    host_query_lengths: npt.NDArray[np.int32]
    shares: bool = True


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over their sequences' paged context.

    Scores and sums are accumulated in float32.  A result may depend only on the sequence's own first
    ``lengths[b]`` positions: other content of the pool, NaN included, must not reach it.

    A whole decode step is captured only if the backend is a ``CapturableAttention`` or ``GraphAttentionBuilder``.
    """

    def plan_step(self, batch: AttentionBatch) -> None:
        """Prepare one step (plan, index tensors).  Called once before the step's layers."""
        ...

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH in q's dtype, where H is a value's size.  The pool already holds the step's K/V of this layer.

        Called once per layer and step, in layer order: the first call can prepare what all layers share on the device.
        """
        ...


@runtime_checkable
class WritingAttention(Protocol):
    """A backend that can write its result into a given tensor."""

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Compute ``attend`` into ``out_TNH``, which is contiguous, as a tensor that ``attend`` returns."""
        ...


@runtime_checkable
class CapturableAttention(Protocol):
    """A backend whose ``attend`` a graph may hold, if ``capturable`` is true.

    ``plan_step`` depends on shapes alone, and at each run the kernels read page tables and lengths where the batch has
    them.  So after one ``plan_step`` a captured ``attend`` may be replayed any number of times."""

    capturable: bool


@runtime_checkable
class GraphAttentionBuilder(Protocol):
    """A backend that builds another backend for each graph."""

    def for_graph(self, batch: AttentionBatch) -> AttentionBackend:
        """Return a backend for one graph, for the decode rows of ``batch``.

        The batch's tensors keep their addresses: the captured step writes them before its first layer, so ``attend``
        reads the step's own tables and lengths on the device.  ``plan_step`` is called before the capture and before
        each replay, with the same tensors, which then still hold the content of the previous step, and with the new
        step's ``host_lengths``; it may queue copies into its own memory.  Padding rows have one token, of the dump
        page."""
        ...


@runtime_checkable
class BeginningAttention(Protocol):
    """A graph's backend that computes something from the step's tables on the device for all layers."""

    def begin_step(self) -> None:
        """Queue that work in the graph: after tables and lengths are written, before the model's first kernel.

        Other kernels then lie between this work and the first kernel that reads it.  A kernel that starts before its
        predecessor has ended sees what earlier kernels wrote, but maybe not what the predecessor writes."""
        ...


def writer_of(backend: AttentionBackend) -> Callable[[int, Tensor, Tensor], None]:
    """Return the backend's ``attend_into``; if it has none, a function that copies the result of ``attend``."""
    if isinstance(backend, WritingAttention):
        return backend.attend_into

    def copy(layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        out_TNH.copy_(backend.attend(layer, q_TNH))

    return copy


def is_capturable(backend: AttentionBackend) -> bool:
    """Return whether a graph may hold the backend's ``attend``."""
    return isinstance(backend, CapturableAttention) and backend.capturable


class AttentionFactory(Protocol):
    """The result of an attention plugin's hook: builds one rank's backend, or raises an error that says why not."""

    def __call__(self, spec: AttentionSpec, pool: KVPool) -> AttentionBackend: ...
