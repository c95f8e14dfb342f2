"""Draft models of one layer, which read a token's embedding and the target model's hidden states at the token before;
and one of them, an EAGLE-3 head.

Legend: T tokens of a pass · N rows that get a draft token · D model dim · V tokens that the head can propose
        L layers of the model whose states are read
Owns: the order of operations.  Does not know: where states are kept, how its tokens map to the model's.
Source: Li et al. 2025, EAGLE-3; here drafts are chains of the likeliest token each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from engine.features.speculation.head_files import EagleHeadShape, HeadShape
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear, VocabLinear
from engine.layers.packing import Linears
from engine.layers.part import Norm, build
from engine.layers.step import StepTensors
from engine.layers.task_head import TaskHead
from engine.layers.weights import WeightSlice, whole
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.frequencies import build_rotary
from engine.models.hybrid_layer import HybridLayer, LayerPlace
from engine.models.model import attention_spec_of


class States(Protocol):
    """The stored hidden states of the target model."""

    def read(self, slots_T: Tensor) -> Tensor:
        """Return fused states, [T, D]."""
        ...


class StatesHead(ABC):
    """A ``Model`` of one layer that drafts.  A pass's token_ids_T are the tokens after its positions; states are at the
    positions.

    model: the target model.  states: states of the tokens in the pool's pages.  Both are set before the first pass.
    layer, fuse, norm: its parts, which have all its linear layers but the LM head."""

    model: Decoder
    states: States
    shape: HeadShape
    layer: DecoderLayer | HybridLayer
    fuse: Linear
    norm: Norm
    parameter_bytes: int
    weight_bytes: int
    attention_spec: AttentionSpec
    task_head: TaskHead | None = None
    doubled_bytes = 0

    def __init__(self, shape: HeadShape, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self._kernels: LayerKernels | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the linear kernel computes."""
        return *self.layer.linears, self.fuse

    @property
    def linears_per_layer(self) -> int:
        """Number of the head's linear layers."""
        return len(self.linears)

    @abstractmethod
    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Make one state of those of the target model at tokens, [T, D].  states: x_TD for each of the layers."""

    @abstractmethod
    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Return the state of each token or wanted row, which also serves as the next token's target state."""

    @abstractmethod
    def logits(self, x_ND: Tensor) -> Tensor:
        """Return logits_NV of rows from ``hidden``, over the head's own tokens."""

    @abstractmethod
    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this rank reads."""

    @abstractmethod
    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of the layers' weights, and of the LM head; call before ``load``."""

    @abstractmethod
    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the weights with ``read`` and lay them out for their kernels (``Model.load``)."""

    def forward(self, step: StepTensors) -> Tensor:
        """Store keys and values and return logits_NV for ``step.sample_at_N``."""
        return self.logits(self.hidden(step, step.sample_at_N))

    def normed(self, x_ND: Tensor) -> Tensor:
        """Return the LM head's input for rows from ``hidden``."""
        return self.norm(x_ND)

    def kept_weights(self, *, with_embedding: bool) -> Iterator[Tensor]:
        """Yield none: heads are published in floats."""
        return iter(())

    def _linear_bytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)


class EagleHead(StatesHead):
    """An EAGLE-3 head."""

    shape: EagleHeadShape
    layer: DecoderLayer

    def __init__(self, shape: EagleHeadShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        (layer,) = shape.layers
        place = (shape.hidden_size, comm, device, dtype)
        self.layer = DecoderLayer(layer, shape.hidden_size, LayerPlace(rotary=0), comm, device, dtype)
        self.state_norm = build(Norm, shape.state_norm, *place)
        self.fuse = Linear(shape.num_states * shape.state_size, shape.hidden_size, False, device, dtype)
        (attention,) = shape.attentions
        assert attention.rotary is not None
        self.rotary = build_rotary(attention.rotary, shape.head_size, device, dtype)
        self.norm = build(Norm, shape.norm, *place)
        self.head = VocabLinear(shape.draft_vocab_size, shape.hidden_size, comm, device, dtype)
        self.attention_spec = attention_spec_of(shape, [self.layer.attention])
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Fuse the target model's states at tokens into one, [T, D].  states: x_TD for each of the layers."""
        return self.fuse(torch.cat([*states], dim=-1))

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Return the state of each token or wanted row, which also serves as the next token's target state."""
        layer, kernels = self.layer, self._kernels
        states_TD = self.states.read(step.slots_T)
        embedded_TD = layer.before_attention(self.model.embedding.embed(step.token_ids_T, kernels))
        normed_TD = self.state_norm(states_TD)
        angles = self.rotary.angles(step.positions_T, kernels)
        both_TI = torch.cat((embedded_TD, normed_TD), dim=-1)
        q_TQH = layer.attention.project(0, both_TI, self.rotary, angles, step, kernels)
        attended_TQH = step.attention.attend(0, q_TQH)
        residual_TD = normed_TD if self.shape.norm_before_residual else states_TD
        if wanted_N is not None:
            residual_TD, attended_TQH = (one.index_select(0, wanted_N) for one in (residual_TD, attended_TQH))
        return residual_TD.add_(layer.finish(residual_TD, residual_TD, attended_TQH, kernels))

    def logits(self, x_ND: Tensor) -> Tensor:
        """Return logits_NV of rows from ``hidden``, over the head's own tokens."""
        return self.head.logits(self.norm(x_ND), as_float32=self._kernels is None)

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this rank reads."""
        return chain(self._layer_slices(), self.norm.slices(""), self.head.slices(self.shape.names.head))

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of the layers' weights, and of the LM head; call before ``load``."""
        shapes = [(linear.weight.shape[0], linear.weight.shape[1]) for linear in (*self.linears, self.head)]
        return shapes[:-1], shapes[-1]

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the weights with ``read`` and lay them out for their kernels (``Model.load``)."""
        self._kernels = kernels
        plain_bytes = self._linear_bytes()
        read(self._layer_slices())
        self.layer.pack(kernels, linears)
        self.fuse.pack(linears.layers)
        read(chain(self.norm.slices(""), self.head.slices(self.shape.names.head)))
        self.head.pack(linears.head)
        for norm in (self.state_norm, self.norm):
            norm.pack(kernels)
        self.weight_bytes += self._linear_bytes() - plain_bytes

    def _linear_bytes(self) -> int:
        return super()._linear_bytes() + self.head.nbytes

    def _layer_slices(self) -> Iterator[WeightSlice]:
        names = self.shape.names
        yield from self.layer.slices(names.layers)
        yield from self.state_norm.slices(names.layers)
        yield whole("fc.weight", self.fuse.weight)
