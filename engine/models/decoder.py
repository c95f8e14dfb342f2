"""The decoder that all families share: embedding, layers of attention and MLP, norm, LM head.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
        Q query heads · H head size
Owns: the order of operations.  Does not know: families, files, the scheduler, which attention backend runs.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import DecoderShape, LayerShape, RotaryShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.linear import Linear, VocabLinear
from engine.layers.packing import LinearKernel, Linears
from engine.layers.part import Attention, FeedForward, Norm, RowwisePart, build
from engine.layers.rotary import Rotary
from engine.layers.step import StateTap, StepTensors
from engine.layers.task_head import TaskHead
from engine.layers.weights import WeightSlice, parameter, whole
from engine.models.frequencies import frequencies
from engine.models.model import attention_spec_of


class DecoderLayer:
    """One layer, in two halves around the attention call, so that a graph can capture each half.

    rotary: index of its rotary embedding in the decoder; None for a layer without positions."""

    def __init__(
        self,
        shape: LayerShape,
        hidden_size: int,
        rotary: int | None,
        comm: Comm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        place = (hidden_size, comm, device, dtype)
        self.rotary = rotary
        self.parallel = shape.parallel
        self.before_attention = build(Norm, shape.before_attention, *place)
        self.attention = build(Attention, shape.attention, *place)
        self.behind_attention = build(Norm, shape.behind_attention, *place)
        self.before_mlp = build(Norm, shape.before_mlp, *place)
        self.mlp = build(FeedForward, shape.mlp, *place)
        self.behind_mlp = build(Norm, shape.behind_mlp, *place)
        first = (self.before_attention, self.attention, self.behind_attention)
        self.parts = (*first, self.before_mlp, self.mlp, self.behind_mlp)

    def finish(self, x_TD: Tensor, normed_TD: Tensor, attended_TQH: Tensor, kernels: LayerKernels | None) -> Tensor:
        """Add the attention's result to the residual stream, in place, and return the MLP's result, not yet added.  If
        both are parallel, return their sum.  normed_TD: the attention's input."""
        update_TD = self.behind_attention(self.attention.output(attended_TQH))
        if self.parallel:
            return self.behind_mlp(self.mlp(normed_TD, kernels)).add_(update_TD)
        return self.behind_mlp(self.mlp(self.before_mlp.added(x_TD, update_TD, kernels), kernels))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Layers that the linear kernel computes, in the order of their products."""
        return *self.attention.linears, *self.mlp.linears

    def pack(self, kernels: LayerKernels | None, kernel: LinearKernel) -> None:
        """Lay the weights out for the device and its kernels; called once, after loading."""
        for linear in self.linears:
            linear.pack(kernel)
        for part in self.parts:
            part.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the slices of the checkpoint that this layer reads."""
        for part in self.parts:
            yield from part.slices(prefix)


class Decoder:
    """One rank's part of the model.  Run it under ``torch.inference_mode``: it writes in place and keeps no gradients.

    attention_spec: the attention that the backend and the KV pool of this rank must fit.
    parameter_bytes: memory of this rank's weights as loaded.  weight_bytes: memory once they are laid out.
    tap: reader of hidden states; None for none.
    kernels: fused kernels; None before ``load``, and if torch computes.
    """

    def __init__(self, shape: DecoderShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.embedding = VocabLinear(shape.vocab_size, shape.hidden_size, comm, device, dtype)
        self.positions: Tensor | None = None
        if shape.learned_positions:
            self.positions = parameter(shape.learned_positions, shape.hidden_size, device=device, dtype=dtype)
        rotaries: dict[RotaryShape, int] = {}
        self.layers = []
        for layer in shape.layers:
            turn = layer.attention.rotary
            number = None if turn is None else rotaries.setdefault(turn, len(rotaries))
            self.layers.append(DecoderLayer(layer, shape.hidden_size, number, comm, device, dtype))
        self.rotaries = [build_rotary(turn, shape.head_size, device, dtype) for turn in rotaries]
        self.norm = build(Norm, shape.norm, shape.hidden_size, comm, device, dtype)
        self.head: VocabLinear | TaskHead = self.embedding
        if shape.task_head is not None:
            self.head = build(TaskHead, shape.task_head, shape.hidden_size, comm, device, dtype)
        elif not shape.tied:
            self.head = VocabLinear(shape.vocab_size, shape.hidden_size, comm, device, dtype)
        self.attention_spec = attention_spec_of(shape, [layer.attention for layer in self.layers])
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())
        self.kernels: LayerKernels | None = None
        self._rowwise = False
        self.tap: StateTap | None = None
        scale = shape.embedding_scale
        self.embedding_scale = torch.tensor(scale, dtype=dtype).item() if shape.rounded_scale else scale

    @property
    def task_head(self) -> TaskHead | None:
        """The head of a model that generates nothing; None if it generates."""
        return self.head if isinstance(self.head, TaskHead) else None

    @property
    def doubled_bytes(self) -> int:
        """Memory of the table that a tied LM head keeps in two layouts; 0 if the head is not tied."""
        return self.embedding.weight.nbytes if self.head is self.embedding else 0

    @property
    def linears_per_layer(self) -> int:
        """Number of linear layers in the first layer."""
        return len(self.layers[0].linears)

    def forward(self, step: StepTensors) -> Tensor:
        """Store the step's keys and values and return logits_NV for ``step.sample_at_N`` (``logits``)."""
        return self.logits(self.hidden(step, step.sample_at_N))

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        """Store the step's keys and values and return x_TD, the input of ``logits``, or its ``wanted_N`` rows."""
        # A compiler fuses by itself, and does it better with operations that it can trace.
        kernels = None if self.kernels is None or torch.compiler.is_dynamo_compiling() else self.kernels
        x_TD = self._embed(step, kernels)
        angles = [rotary.angles(step.positions_T, kernels) for rotary in self.rotaries]
        last = len(self.layers) - 1
        update_TD, states = None, []
        for index, layer in enumerate(self.layers):
            normed_TD = layer.before_attention.added(x_TD, update_TD, kernels)
            if self.tap is not None and index in self.tap.layers:
                states.append(x_TD.clone())  # later layers add to it in place
            turn = layer.rotary
            rotary, of_step = (None, ()) if turn is None else (self.rotaries[turn], angles[turn])
            q_TQH = layer.attention.project(index, normed_TD, rotary, of_step, step, kernels)
            attended_TQH = step.attention.attend(index, q_TQH)
            if index == last and wanted_N is not None:
                # Nothing reads the other rows after this: a prefill saves most of its last layer.
                x_TD = x_TD.index_select(0, wanted_N)
                attended_TQH = attended_TQH.index_select(0, wanted_N)
                if layer.parallel:
                    normed_TD = normed_TD.index_select(0, wanted_N)
            update_TD = layer.finish(x_TD, normed_TD, attended_TQH, kernels)
        if self.tap is not None:
            self.tap.keep(states, step)
        return x_TD if update_TD is None else x_TD.add_(update_TD)

    def logits(self, x_ND: Tensor) -> Tensor:
        """Return logits_NV of rows from ``hidden``: float32, or the model's dtype if kernels sample."""
        normed_ND = self.normed(x_ND)
        if self.shape.logit_scale != 1.0:
            normed_ND = normed_ND * self.shape.logit_scale
        logits_NV = self.head.logits(normed_ND, as_float32=self.kernels is None or self._rowwise)
        if cap := self.shape.logit_cap:
            logits_NV = logits_NV.div_(cap).tanh_().mul_(cap)
        return logits_NV

    def normed(self, x_ND: Tensor) -> Tensor:
        """Return the LM head's input for rows from ``hidden``: the model's last representation of them."""
        return self.norm.added(x_ND, None, self.kernels)

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices that this rank reads.  Together the targets are all parameters, each element once."""
        names = self.shape.names
        yield from self._table_slices()
        for index, layer in enumerate(self.layers):
            yield from layer.slices(f"{names.layers}.{index}")
        yield from self.norm.slices("")
        if self.head is not self.embedding:
            yield from self.head.slices(names.head)

    def by_rows(self) -> None:
        """Make the parts compute a token with the same bits whatever else is in a step (``model.numerics``)."""
        self._rowwise = True  # the sampler gets float32 logits: sums in another dtype have another order
        on_cpu = self.device.type == "cpu"  # only there threads divide an activation
        for part in (one for layer in self.layers for one in layer.parts if on_cpu and isinstance(one, RowwisePart)):
            part.by_rows()

    def linear_shapes(self) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return (outputs, inputs) of all weights of the layers in order, and of the LM head; call before ``load``."""

        def shape(linear: Linear | TaskHead) -> tuple[int, int]:
            outputs, inputs = linear.weight.shape
            return outputs, inputs

        return [shape(linear) for layer in self.layers for linear in layer.linears], shape(self.head)

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        """Fill the slices with ``read``, one layer after the other, and lay each layer out for its kernels before the
        next: the plain weights are freed if another layout replaces them.  Do not use ``slices`` afterwards.

        The LM head is laid out, too, although a tied one is then there twice, since the embedding reads its rows:
        it is a quarter of a small model's work.
        """
        self.kernels = kernels
        plain_bytes = self._linear_bytes()
        read(self._table_slices())
        if self.head is not self.embedding:
            self.embedding.pack_kept(linears.head)
        for index, layer in enumerate(self.layers):
            read(layer.slices(f"{self.shape.names.layers}.{index}"))
            layer.pack(kernels, linears.layers)
        read(self.norm.slices(""))
        self.norm.pack(kernels)
        if self.head is not self.embedding:
            read(self.head.slices(self.shape.names.head))
        self.head.pack(linears.head, keep_weight=self.head is self.embedding)
        self.weight_bytes += self._linear_bytes() - plain_bytes

    def _linear_bytes(self) -> int:
        linears = [self.embedding, *(linear for layer in self.layers for linear in layer.linears)]
        own_head = 0 if self.head is self.embedding else self.head.nbytes
        return own_head + sum(linear.nbytes for linear in linears)

    def kept_weights(self) -> Iterator[Tensor]:
        """Yield the weights that ``load`` lays out, whose rows need not be filled if a kernel takes them as stored."""
        yield self.embedding.weight
        if isinstance(self.head, VocabLinear) and self.head is not self.embedding:
            yield self.head.weight
        for layer in self.layers:
            yield from (linear.weight for linear in layer.linears)

    def _table_slices(self) -> Iterator[WeightSlice]:
        yield from self.embedding.slices(self.shape.names.embedding)
        if self.positions is not None:
            yield whole(f"{self.shape.names.positions}.weight", self.positions)

    def _embed(self, step: StepTensors, kernels: LayerKernels | None) -> Tensor:
        x_TD = self.embedding.embed(step.token_ids_T, kernels)
        if self.embedding_scale != 1.0:
            x_TD = x_TD.mul_(self.embedding_scale)
        if self.positions is not None:
            x_TD = x_TD.add_(F.embedding(step.positions_T, self.positions))
        return x_TD


def build_rotary(shape: RotaryShape, head_size: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    frequencies_R = frequencies(shape, shape.size or head_size).to(device)
    return Rotary(frequencies_R, shape.attention_factor, dtype, head_size=head_size, interleaved=shape.interleaved)
