"""A model's own layer for multi-token prediction (DeepSeek-AI 2024), which drafts as a head does.

Legend: T tokens of a pass · N rows that get a draft token · D model dim · V vocabulary
Owns: the order of operations.  Does not know: where states are kept, families.

It reads what the model's LM head reads of a token, and the embedding of the next one.  What it gives to the LM head is
the state that it reads for the guess after that, as the layers of a published model that has several would.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.features.speculation.head_model import StatesHead
from engine.features.speculation.mtp_files import MTPHeadShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear
from engine.layers.packing import Linears
from engine.layers.part import Norm, build
from engine.layers.step import StepTensors
from engine.layers.weights import WeightSlice, whole
from engine.models.decoder import DecoderLayer
from engine.models.frequencies import build_rotary
from engine.models.hybrid_layer import HybridLayer, LayerPlace
from engine.models.model import attention_spec_of


class MTPHead(StatesHead):
    """A layer for multi-token prediction.  Embedding and LM head are the model's."""

    shape: MTPHeadShape

    def __init__(self, shape: MTPHeadShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        own, place = shape.own, (shape.hidden_size, comm, device, dtype)
        (layer,) = shape.layers
        kind = DecoderLayer if layer.is_plain else HybridLayer
        self.layer = kind(layer, shape.hidden_size, LayerPlace(rotary=0), comm, device, dtype)
        self.embedding_norm = build(Norm, own.embedding_norm, *place)
        self.state_norm = build(Norm, own.state_norm, *place)
        self.fuse = Linear(2 * shape.hidden_size, shape.hidden_size, False, device, dtype)
        self.norm = build(Norm, own.norm, *place)
        (attention,) = shape.attentions
        self.rotary = None
        if attention.rotary is not None:
            self.rotary = build_rotary(attention.rotary, shape.head_size, device, dtype)
        assert self.layer.attention is not None, "a layer for multi-token prediction has attention"
        self.attention_spec = attention_spec_of(shape, [self.layer.attention])
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        """Return what the LM head reads of tokens, [T, D].  states: the last layer's result."""
        (x_TD,) = states
        return self.model.normed(x_TD)

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Return the state of each token or wanted row, which also serves as the next token's target state."""
        layer, kernels, rotary = self.layer, self._kernels, self.rotary
        embedded_TD = self.model.embedding.embed(step.token_ids_T, kernels)
        if (scale := self.shape.embedding_scale) != 1.0:
            embedded_TD = embedded_TD * scale
        both_TI = torch.cat((self.embedding_norm(embedded_TD), self.state_norm(self.states.read(step.slots_T))), dim=-1)
        x_TD = self.fuse(both_TI)
        normed_TD = layer.before_attention(x_TD)
        angles = () if rotary is None else rotary.angles(step.positions_T, kernels)
        attended_TM = layer.attend(normed_TD, rotary, angles, step, kernels)
        if wanted_N is not None:
            x_TD, normed_TD, attended_TM = (one.index_select(0, wanted_N) for one in (x_TD, normed_TD, attended_TM))
        return self.norm(x_TD.add_(layer.finish(x_TD, normed_TD, attended_TM, kernels)))

    def logits(self, x_ND: Tensor) -> Tensor:
        """Return logits_NV of rows from ``hidden``."""
        return self.model.head.logits(x_ND, as_float32=self._kernels is None)

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this rank reads."""
        own = self.shape.own
        yield from self.layer.slices(own.prefix)
        for norm in (self.embedding_norm, self.state_norm, self.norm):
            yield from norm.slices("")
        yield whole(f"{own.fuse}.weight", self.fuse.weight)

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of the weights; call before ``load``.  The last one stands for an LM head."""
        shapes = [(linear.weight.shape[0], linear.weight.shape[1]) for linear in self.linears]
        return shapes, shapes[-1]

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the weights with ``read`` and lay them out for their kernels (``Model.load``)."""
        self._kernels = kernels
        plain_bytes = self._linear_bytes()
        read(self.slices())
        self.layer.pack(kernels, linears)
        self.fuse.pack(linears.layers)
        for norm in (self.embedding_norm, self.state_norm, self.norm):
            norm.pack(kernels)
        self.weight_bytes += self._linear_bytes() - plain_bytes
