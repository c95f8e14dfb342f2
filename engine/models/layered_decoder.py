"""The decoder of models whose layers differ in their heads, share keys and values, and have inputs of their own.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted · D model dim · V vocabulary
        Q query heads · H head size · L layers · P size of a layer's input
Owns: the order of operations in such a model.  Does not know: families, files, which attention backend runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.checkpoints.layered_shape import BorrowingShape, LayeredLayerShape, LayeredShape
from engine.checkpoints.shape import RotaryShape
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.layer_inputs import InputGate, LayerInputs
from engine.layers.linear import Linear, VocabLinear
from engine.layers.packing import Linears
from engine.layers.part import Norm, build
from engine.layers.step import StepTensors
from engine.layers.task_head import TaskHead
from engine.layers.weights import WeightSlice, joined, parameter, whole
from engine.models.decoder import DecoderLayer
from engine.models.decoder_weights import DecoderWeights
from engine.models.frequencies import build_rotary
from engine.models.hybrid_layer import LayerPlace, places
from engine.models.model import attention_spec_of


class LayeredLayer(DecoderLayer):
    """One layer, whose sum gets an input of its own and is multiplied by a number at the end."""

    takes_inserts = False  # what is added behind a layer would have to be in its sum already

    def __init__(
        self,
        shape: LayeredLayerShape,
        width: int,
        place: LayerPlace,
        comm: Comm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, width, place, comm, device, dtype)
        arguments = (width, comm, device, dtype)
        self.input = None if shape.input is None else InputGate(shape.input, *arguments)
        self.behind_input = build(Norm, shape.behind_input, *arguments)
        self.scalar = parameter(1, device=device, dtype=dtype)
        self._scalar_name = shape.scalar

    @property
    def linears(self) -> tuple[Linear, ...]:
        return super().linears if self.input is None else (*super().linears, *self.input.linears)

    def finish_with(
        self, x_TD: Tensor, attended_TQH: Tensor, input_TP: Tensor | None, kernels: LayerKernels | None
    ) -> None:
        """Add what the layer computes of attention's result to the sum x, in place."""
        x_TD.add_(self.finish(x_TD, x_TD, attended_TQH, kernels))
        if self.input is not None:
            assert input_TP is not None, "a layer with an input of its own gets one"
            x_TD.add_(self.behind_input(self.input(x_TD, input_TP)))
        x_TD.mul_(self.scalar)

    def pack(self, kernels: LayerKernels | None, linears: Linears) -> None:
        super().pack(kernels, linears)
        self.behind_input.pack(kernels)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield from super().slices(prefix)
        if self.input is not None:
            yield from self.input.slices(prefix)
        yield from self.behind_input.slices(prefix)
        yield whole(joined(prefix, self._scalar_name), self.scalar)


class LayeredDecoder(DecoderWeights):
    """One rank's part of the model (``Model``)."""

    def __init__(self, shape: LayeredShape, comm: Comm, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.shape = shape
        self.vocab_size = shape.vocab_size
        place = (shape.hidden_size, comm, device, dtype)
        self.embedding = VocabLinear(shape.vocab_size, *place)
        self.positions = None
        self.inputs = None if shape.inputs is None else LayerInputs(shape.inputs, *place)
        rotaries: dict[RotaryShape, int] = {}
        self.layers: list[LayeredLayer] = []
        for layer, at in zip(shape.layers, places(shape.layers, rotaries), strict=True):
            assert isinstance(layer, LayeredLayerShape), f"{type(layer).__name__} is a layer of another decoder"
            self.layers.append(LayeredLayer(layer, shape.hidden_size, at, comm, device, dtype))
        self.rotaries = [build_rotary(one, one.size, device, dtype) for one in rotaries]
        self.norm = build(Norm, shape.norm, *place)
        self.head: VocabLinear | TaskHead = self.embedding if shape.tied else VocabLinear(shape.vocab_size, *place)
        self.attention_spec = _spec_of(shape, self.layers)
        self.parameter_bytes = self.weight_bytes = sum(one.target.nbytes for one in self.slices())
        self.kernels: LayerKernels | None = None
        self.embedding_scale = torch.tensor(shape.embedding_scale, dtype=dtype).item()

    def forward(self, step: StepTensors) -> Tensor:
        return self.logits(self.hidden(step, step.sample_at_N))

    def hidden(self, step: StepTensors, wanted_N: Tensor | None = None) -> Tensor:
        kernels = None if self.kernels is None or torch.compiler.is_dynamo_compiling() else self.kernels
        x_TD = self.embedding.embed(step.token_ids_T, kernels).mul_(self.embedding_scale)
        x_TD = x_TD if step.inserts is None else step.inserts.embed(x_TD)
        inputs_TLP = None if self.inputs is None else self.inputs(step.token_ids_T, x_TD, kernels)
        turned = [(rotary, rotary.angles(step.positions_T, kernels)) for rotary in self.rotaries]
        own: dict[int, StepTensors] = {}  # a step for each distance of slots
        for index, layer in enumerate(self.layers):
            stride = step.pool.stride_of(index)
            if stride not in own:
                own[stride] = replace(step, slots_T=step.pool.own_slots(index, step.slots_T))
            normed_TD = layer.before_attention.added(x_TD, None, kernels)
            rotary, angles = (None, ()) if layer.rotary is None else turned[layer.rotary]
            attended_TQH = layer.attend(normed_TD, rotary, angles, own[stride], kernels)
            input_TP = None if inputs_TLP is None else inputs_TLP[:, index]
            if index == len(self.layers) - 1 and wanted_N is not None:
                x_TD, attended_TQH = x_TD.index_select(0, wanted_N), attended_TQH.index_select(0, wanted_N)
                input_TP = None if input_TP is None else input_TP.index_select(0, wanted_N)
            layer.finish_with(x_TD, attended_TQH, input_TP, kernels)
        return x_TD

    def logits(self, x_ND: Tensor) -> Tensor:
        logits_NV = self.head.logits(self.normed(x_ND), as_float32=self.kernels is None)
        if cap := self.shape.logit_cap:
            logits_NV = logits_NV.div_(cap).tanh_().mul_(cap)
        return logits_NV

    def normed(self, x_ND: Tensor) -> Tensor:
        return self.norm.added(x_ND, None, self.kernels)

    def load(
        self, read: Callable[[Iterator[WeightSlice]], None], kernels: LayerKernels | None, linears: Linears
    ) -> None:
        super().load(read, kernels, linears)
        if self.inputs is not None:
            self.inputs.pack(kernels)

    def _table_slices(self) -> Iterator[WeightSlice]:
        yield from super()._table_slices()
        if self.inputs is not None:
            yield from self.inputs.slices("")


def _spec_of(shape: LayeredShape, layers: list[LayeredLayer]) -> AttentionSpec:
    """Return the attention of a rank's layers, each with its own heads."""
    attentions = [layer.attention for layer in layers]
    shapes = list(shape.attentions)
    heads = tuple((one.num_keys, at.head_size) for one, at in zip(attentions, shapes, strict=True))
    lenders = tuple(one.lender if isinstance(one, BorrowingShape) else at for at, one in enumerate(shapes))
    num_keys, head_size = max(heads, key=lambda one: one[1])
    spec = attention_spec_of(shape, attentions)
    return replace(spec, num_kv_heads=num_keys, head_size=head_size, heads=heads, lenders=lenders)
