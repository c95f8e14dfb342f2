"""A layer of a decoder with recurrent layers: any of attention, a recurrent part and an MLP, between norms.

Legend: T new tokens in the step (ragged, packed) · D model dim · Q query heads · H head size
        M numbers of a token between a layer's two halves
Owns: the order of operations in such a layer, the places of layers in what they share.
Does not know: other layers, which attention backend runs.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.checkpoints.shape import LayerShape, RotaryShape
from engine.layers.comm import Comm
from engine.layers.gated_attention import GatedAttention
from engine.layers.kernels import LayerKernels
from engine.layers.part import Attention, FeedForward, Norm, Recurrent, build
from engine.layers.rotary import Rotary
from engine.layers.step import StepTensors
from engine.models.decoder_weights import LayerWeights

Angles = tuple[Tensor, ...]


class LayerPlace(NamedTuple):
    """The place of a layer in what layers share.

    rotary: index of its rotary embedding in the decoder; None for a layer without positions.
    attention: index among the layers with attention, in the KV pool and for the backend.
    recurrent: index among the layers with states."""

    rotary: int | None = None
    attention: int = 0
    recurrent: int = 0


def places(layers: Sequence[LayerShape], rotaries: dict[RotaryShape, int]) -> Iterator[LayerPlace]:
    """Yield the place of each layer.  rotaries: gets the index of each rotary embedding."""
    num_attentions = num_recurrents = 0
    for layer in layers:
        rotary = None if layer.attention is None else layer.attention.rotary
        number = None if rotary is None else rotaries.setdefault(rotary, len(rotaries))
        yield LayerPlace(number, num_attentions, num_recurrents)
        num_attentions += layer.attention is not None
        num_recurrents += layer.recurrent is not None


class HybridLayer(LayerWeights):
    """One layer of a decoder with recurrent layers: any of attention, a recurrent part and an MLP, in two halves.

    rotary: as in ``LayerPlace``."""

    parallel = False

    def __init__(
        self,
        shape: LayerShape,
        hidden_size: int,
        place: LayerPlace,
        comm: Comm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert not shape.parallel, "a layer with a recurrent part, or without attention or MLP, is not parallel"
        arguments = (hidden_size, comm, device, dtype)
        self.rotary, self._index, self._state_index = place
        self._attended = 0  # numbers of a token from the backend
        if (one := shape.attention) is not None:
            self._attended = one.num_heads // comm.size * (one.latent_size or one.head_size)
        self.before_attention = build(Norm, shape.before_attention, *arguments)
        self.attention = None if shape.attention is None else build(Attention, shape.attention, *arguments)
        self.recurrent = None if shape.recurrent is None else build(Recurrent, shape.recurrent, *arguments)
        self.behind_attention = build(Norm, shape.behind_attention, *arguments)
        self.before_mlp = build(Norm, shape.before_mlp, *arguments)
        self.mlp = None if shape.mlp is None else build(FeedForward, shape.mlp, *arguments)
        self.behind_mlp = build(Norm, shape.behind_mlp, *arguments)
        self.products = tuple(one for one in (self.attention, self.recurrent, self.mlp) if one is not None)
        norms = (self.before_attention, self.behind_attention, self.before_mlp, self.behind_mlp)
        self.parts = (*norms, *self.products)

    def attend(
        self,
        normed_TD: Tensor,
        rotary: Rotary | None,
        angles: Angles,
        step: StepTensors,
        kernels: LayerKernels | None,
    ) -> Tensor:
        """Return what ``finish`` reads of the first half, [T, M]: of attention, and then of the recurrent part."""
        halves = []
        if self.attention is not None:
            q_TQH = self.attention.project(self._index, normed_TD, rotary, angles, step, kernels)
            attended_TQH = step.attention.attend(self._index, q_TQH)
            if isinstance(self.attention, GatedAttention):
                attended_TQH = self.attention.gated(attended_TQH, normed_TD, kernels)
            halves.append(attended_TQH.flatten(1))
        if self.recurrent is not None:
            assert step.states is not None, "a step of a model with recurrent layers has states"
            states = step.states.layers[self._state_index]
            halves.append(self.recurrent.advance(normed_TD, states, step.states, kernels))
        return halves[0] if len(halves) == 1 else torch.cat([normed_TD[:, :0], *halves], 1)

    def finish(self, x_TD: Tensor, normed_TD: Tensor, mixed_TM: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Add the first half's result to the residual stream, in place, and return the MLP's result, not yet added.
        Without an MLP, return the first half's result."""
        update_TD = self._mixed(mixed_TM)
        if self.mlp is None:
            assert update_TD is not None, "a layer has attention, a recurrent part or an MLP"
            return update_TD
        return self.behind_mlp(self.mlp(self.before_mlp.added(x_TD, update_TD, kernels), kernels))

    def _mixed(self, mixed_TM: Tensor) -> Tensor | None:
        """Return the sum of what attention and the recurrent part give; None without both."""
        updates = []
        if (attention := self.attention) is not None:
            attended_TM, mixed_TM = mixed_TM.tensor_split((self._attended,), 1)
            updates.append(attention.output(attended_TM.unflatten(1, (attention.num_queries, -1))))
        if self.recurrent is not None:
            updates.append(self.recurrent.output(mixed_TM))
        if not updates:
            return None
        return self.behind_attention(updates[0] if len(updates) == 1 else updates[0].add_(updates[1]))
