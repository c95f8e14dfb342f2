"""The seam between a model and an attention kernel: what a step tells the backend, and what it must do.

Legend: T new tokens in the step (ragged, packed) · B sequences · D decode rows (the first D of B)
        P page-table width · N query heads · G KV heads · H head size
Owns: the Protocol and the batch description.  Does not know: kernels, models, the scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.checkpoints.shape import LATENTS, LAYER_WINDOWS, SINKS, SOFT_CAP
from engine.layers.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the attention of a model looks like on one rank, known before the pool is allocated.

    scale multiplies the scores.  window: how many tokens back a query sees, itself included; 0 for all.
    first_window_layer: the layers before it see everything, whatever the window; full_layers: those behind it that do.
    soft_cap: a score becomes soft_cap * tanh(score / soft_cap), before masks; 0 for none.
    sinks: for each layer a score for each query head, [N], that takes part in the softmax and has no value; or empty.
    latent_size: values are the first so many numbers of their keys, which the pool has once; 0 for values of their own.

    The last four are for backends that declare them, see ``Declaration.supports``.
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

    @property
    def value_size(self) -> int:
        """Numbers of a value, and of a head's result."""
        return self.latent_size or self.head_size

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the last four there is, by the names that ``Declaration.supports`` has for it."""
        there = {SOFT_CAP: self.soft_cap, SINKS: self.sinks, LAYER_WINDOWS: self.full_layers, LATENTS: self.latent_size}
        return tuple(name for name, value in there.items() if value)

    def window_of(self, layer: int) -> int:
        """The layer's window; 0 if it sees everything."""
        return 0 if layer < self.first_window_layer or layer in self.full_layers else self.window

    def shortened(self, num_layers: int) -> "AttentionSpec":
        """The attention of a model with fewer layers, in which there is one of each kind: what trials run on."""
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
    """The sequences of one step: first the decode rows (one query each), then the prefill segments.

    page_table_BP: int32 on the device; entry [b, i] is the page of positions i*page_size ... of sequence b.
        Entries past a sequence's last page are 0 and must not be read as its content.
    lengths_B: int32 on the device; context length including this step's tokens.
    query_starts_B1: int32 [B + 1] on the device; sequence b's queries are rows starts[b]:starts[b+1] of T.
        They are its last ``starts[b+1] - starts[b]`` positions, and attend causally.
    host_lengths, host_query_lengths: int32 [B] numpy copies, so that no backend has to ask the device.
    """

    num_decodes: int
    page_table_BP: Tensor
    lengths_B: Tensor
    query_starts_B1: Tensor
    host_lengths: npt.NDArray[np.int32]
    host_query_lengths: npt.NDArray[np.int32]


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over their sequences' paged context.

    Scores and sums are accumulated in float32.  A result may depend only on the sequence's own first
    ``lengths[b]`` positions: whatever else lies in the pool, NaN included, must not reach it.

    A decode step is captured whole only with a backend that is ``CapturableAttention`` or ``GraphAttentionBuilder``.
    """

    def plan_step(self, batch: AttentionBatch) -> None:
        """Prepare one step (plan, index tensors).  Called once before the step's layers."""
        ...

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """out_TNH in q's dtype, H of a value.  The step's own K/V of this layer are in the pool already.

        Layers come in their order, each once a step: what all layers share on the device can be made in the first."""
        ...


@runtime_checkable
class WritingAttention(Protocol):
    """What a backend has beside, if it can leave its result where it is wanted."""

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """``attend``, with the result in ``out_TNH``: contiguous, as ``attend`` returns it."""
        ...


@runtime_checkable
class CapturableAttention(Protocol):
    """What a backend has beside, if a graph may hold its ``attend``; the attribute may also say that it must not.

    ``plan_step`` looks at shapes alone, and kernels read page tables and lengths where the batch has them whenever they
    run.  So after one ``plan_step`` a captured ``attend`` may be replayed for ever."""

    capturable: bool


@runtime_checkable
class GraphAttentionBuilder(Protocol):
    """What a backend has beside, if it builds another one for each graph."""

    def for_graph(self, batch: AttentionBatch) -> AttentionBackend:
        """A backend for one graph, of the decode rows of ``batch``.

        The batch's tensors stay where they are: the captured step writes them before its first layer, so kernels and
        what ``attend`` does on the device read the step's own tables and lengths.  ``plan_step`` is called before the
        capture and each replay with the same tensors, whose content is that of the step before, and the step's
        ``host_lengths``; it may queue copies into its own memory.  Rows that only pad have one token, of the dump
        page."""
        ...


@runtime_checkable
class BeginningAttention(Protocol):
    """What a graph's backend has beside, if it makes something of the step's tables on the device for all layers."""

    def begin_step(self) -> None:
        """Called in the graph once tables and lengths are written, in front of the model's first kernel.

        So other kernels lie between what it makes and the first that reads it: one that begins before the kernel in
        front of it has ended may see what the kernels before that one have written, and not what that one writes."""
        ...


def writer_of(backend: AttentionBackend) -> Callable[[int, Tensor, Tensor], None]:
    """``attend_into`` of a backend, or for one that has none a copy of what it returns."""
    if isinstance(backend, WritingAttention):
        return backend.attend_into

    def copy(layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        out_TNH.copy_(backend.attend(layer, q_TNH))

    return copy


def is_capturable(backend: AttentionBackend) -> bool:
    """Whether a graph may hold the backend's ``attend``."""
    return isinstance(backend, CapturableAttention) and backend.capturable


class AttentionFactory(Protocol):
    """What an attention plugin's hook returns: builds the backend for one rank, or says why it cannot."""

    def __call__(self, spec: AttentionSpec, pool: KVPool) -> AttentionBackend: ...
