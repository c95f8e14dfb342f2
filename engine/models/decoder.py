"""The decoder that most families share: embedding, layers of attention and MLP, norm, LM head.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
        Q query heads · H head size
Owns: the order of operations.  Does not know: families, files, the scheduler, which attention backend runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import DecoderShape, LayerShape, RotaryShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import VocabLinear
from engine.layers.part import Attention, FeedForward, Norm, RowwisePart, build
from engine.layers.recurrent import RecurrentPart
from engine.layers.rotary import Rotary
from engine.layers.step import StateTap, StepTensors
from engine.layers.task_head import TaskHead
from engine.layers.weights import parameter
from engine.models.decoder_weights import DecoderWeights, LayerWeights
from engine.models.frequencies import build_rotary
from engine.models.hybrid_layer import Angles, HybridLayer, LayerPlace, places
from engine.models.model import attention_spec_of


class DecoderLayer(LayerWeights):
    """One layer, in two halves around the attention call, so that a graph can capture each half."""

    attention: Attention
    mlp: FeedForward

    def __init__(
        self, shape: LayerShape, width: int, place: LayerPlace, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        arguments = (width, comm, device, dtype)
        assert shape.attention is not None, "a layer without attention is a HybridLayer"
        assert shape.mlp is not None, "a layer without an MLP is a HybridLayer"
        self.rotary, self._index, _ = place
        self.parallel = shape.parallel
        self.before_attention = build(Norm, shape.before_attention, *arguments)
        self.attention = build(Attention, shape.attention, *arguments)
        self.behind_attention = build(Norm, shape.behind_attention, *arguments)
        self.before_mlp = build(Norm, shape.before_mlp, *arguments)
        self.mlp = build(FeedForward, shape.mlp, *arguments)
        self.behind_mlp = build(Norm, shape.behind_mlp, *arguments)
        first = (self.before_attention, self.attention, self.behind_attention)
        self.parts = (*first, self.before_mlp, self.mlp, self.behind_mlp)
        self.products = (self.attention, self.mlp)

    def attend(
        self, normed_TD: Tensor, rotary: Rotary | None, angles: Angles, step: StepTensors, kernels: LayerKernels | None
    ) -> Tensor:
        """Return the backend's result, [T, Q, H], for the attention's input.  The others are as in ``project``."""
        q_TQH = self.attention.project(self._index, normed_TD, rotary, angles, step, kernels)
        return step.attention.attend(self._index, q_TQH)

    def finish(self, x_TD: Tensor, normed_TD: Tensor, attended_TQH: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Add the attention's result to the residual stream, in place, and return the MLP's result, not yet added.  If
        both are parallel, return their sum.  normed_TD: the attention's input."""
        update_TD = self.behind_attention(self.attention.output(attended_TQH))
        if self.parallel:
            return self.behind_mlp(self.mlp(normed_TD, kernels)).add_(update_TD)
        return self.behind_mlp(self.mlp(self.before_mlp.added(x_TD, update_TD, kernels), kernels))


class Decoder(DecoderWeights):
    """One rank's part of the model.  Run it under ``torch.inference_mode``: it writes in place and keeps no gradients.

    attention_spec: the attention that the backend and the KV pool of this rank must fit.
    tap: reader of hidden states; None for none."""

    def __init__(self, shape: DecoderShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.embedding = VocabLinear(shape.vocab_size, shape.hidden_size, comm, device, dtype)
        self.positions: Tensor | None = None
        if shape.learned_positions:
            self.positions = parameter(shape.learned_positions, shape.hidden_size, device=device, dtype=dtype)
        rotaries: dict[RotaryShape, int] = {}
        self.layers: list[DecoderLayer | HybridLayer] = []
        for layer, place in zip(shape.layers, places(shape.layers, rotaries), strict=True):
            kind = DecoderLayer if layer.is_plain else HybridLayer
            self.layers.append(kind(layer, shape.hidden_size, place, comm, device, dtype))
        self.rotaries = [build_rotary(one, shape.head_size, device, dtype) for one in rotaries]
        self.norm = build(Norm, shape.norm, shape.hidden_size, comm, device, dtype)
        self.head: VocabLinear | TaskHead = self.embedding
        if shape.task_head is not None:
            self.head = build(TaskHead, shape.task_head, shape.hidden_size, comm, device, dtype)
        elif not shape.tied:
            self.head = VocabLinear(shape.vocab_size, shape.hidden_size, comm, device, dtype)
        self.attention_spec = attention_spec_of(shape, self.attentions)
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())
        self.kernels: LayerKernels | None = None
        self._rowwise = False
        self.tap: StateTap | None = None
        scale = shape.embedding_scale
        self.embedding_scale = torch.tensor(scale, dtype=dtype).item() if shape.rounded_scale else scale

    def forward(self, step: StepTensors) -> Tensor:
        return self.logits(self.hidden(step, step.sample_at_N))

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        # A compiler fuses by itself, and does it better with operations that it can trace.
        kernels = None if self.kernels is None or torch.compiler.is_dynamo_compiling() else self.kernels
        x_TD = self._embed(step, kernels)
        turned = [(rotary, rotary.angles(step.positions_T, kernels)) for rotary in self.rotaries]
        update_TD, states, num_layers = None, [], len(self.layers)
        reads_last = self.tap is not None and num_layers in self.tap.layers
        for index, layer in enumerate(self.layers):
            normed_TD = layer.before_attention.added(x_TD, update_TD, kernels)
            if self.tap is not None and index in self.tap.layers:
                states.append(x_TD.clone())  # later layers add to it in place
            rotary, cos_sin = (None, ()) if layer.rotary is None else turned[layer.rotary]
            attended_TQH = layer.attend(normed_TD, rotary, cos_sin, step, kernels)
            if index == num_layers - 1 and wanted_N is not None and not reads_last:
                # Nothing reads the other rows after this: a prefill saves most of its last layer.
                x_TD, attended_TQH = x_TD.index_select(0, wanted_N), attended_TQH.index_select(0, wanted_N)
                normed_TD = normed_TD.index_select(0, wanted_N) if layer.parallel else normed_TD
            update_TD = layer.finish(x_TD, normed_TD, attended_TQH, kernels)
            update_TD = step.inserts.behind(index, update_TD) if step.inserts and layer.takes_inserts else update_TD
        x_TD = x_TD if update_TD is None else x_TD.add_(update_TD)
        if self.tap is not None:
            self.tap.keep([*states, x_TD] if reads_last else states, step)
        return x_TD if wanted_N is None or not reads_last else x_TD.index_select(0, wanted_N)

    def logits(self, x_ND: Tensor) -> Tensor:
        normed_ND = self.normed(x_ND)
        if self.shape.logit_scale != 1.0:
            normed_ND = normed_ND * self.shape.logit_scale
        logits_NV = self.head.logits(normed_ND, as_float32=self.kernels is None or self._rowwise)
        if cap := self.shape.logit_cap:
            logits_NV = logits_NV.div_(cap).tanh_().mul_(cap)
        return logits_NV

    def normed(self, x_ND: Tensor) -> Tensor:
        return self.norm.added(x_ND, None, self.kernels)

    def by_rows(self) -> None:
        """Make the parts compute a token with the same bits whatever else is in a step (``model.numerics``)."""
        self._rowwise = True  # the sampler gets float32 logits: sums in another dtype have another order
        on_cpu = self.device.type == "cpu"  # only there threads divide an activation
        for part in (one for layer in self.layers for one in layer.parts):
            if isinstance(part, RowwisePart) and (on_cpu or isinstance(part, RecurrentPart)):
                part.by_rows()

    def _embed(self, step: StepTensors, kernels: LayerKernels | None) -> Tensor:
        x_TD = self.embedding.embed(step.token_ids_T, kernels)
        if self.embedding_scale != 1.0:
            x_TD = x_TD.mul_(self.embedding_scale)
        if self.positions is not None:
            x_TD = x_TD.add_(F.embedding(step.positions_T, self.positions))
        return x_TD if step.inserts is None else step.inserts.embed(x_TD)
