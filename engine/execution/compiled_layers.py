"""The layers of a decoder as ``decodes.c`` reads them: which it computes, and a record of each.

Legend: S slots of the pool · N rows of the engine, and slots of their states · D model dim
        R query and key heads, or rotated pairs · G key/value heads · H size of a head, or heads with a value
        C channels and K taps of a convolution, or K size of a key · U size of a value
Owns: which parts of a layer C computes, the records.  Does not know: steps, what is computed.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.panels import CompiledWeight, Weight
from engine.layers.convolution import CausalConvolution, ShortConvolution
from engine.layers.gated_attention import GatedAttention
from engine.layers.gated_delta import GatedDelta
from engine.layers.kv_pool import KVPool
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.mlp import GatedMLP
from engine.layers.norm import HeadNorm, RMSNorm, Scaled, UnchangedNorm
from engine.layers.packing import WrappedWeight
from engine.layers.part import Recurrent
from engine.layers.recurrent import RecurrentPart
from engine.layers.self_attention import SelfAttention
from engine.layers.states import RecurrentStates
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.hybrid_layer import HybridLayer

POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
CONVOLUTION, DELTA, SSD = range(3)


class RecurrentRecord(ctypes.Structure):
    """The C struct ``Recurrent`` of ``decodes.c``."""

    _fields_ = (
        *((name, POINTER) for name in ("taps_KC", "bias_C", "decay_H", "bias_H", "skip_H", "norm")),
        *((name, POINTER) for name in ("windows_NKC", "matrices_NHKU")),
        *((name, SIZE) for name in ("kind", "C", "taps", "G", "H", "K", "U")),
        *((name, SIZE) for name in ("slot_step", "of_group", "norm_step", "gated_first")),
        *((name, FLOAT) for name in ("most", "eps")),
    )


class LayerRecord(ctypes.Structure):
    """The C struct ``Layer`` of ``decodes.c``.  The code that fills it keeps the tensors that it points to."""

    _fields_ = (
        *((name, POINTER) for name in ("before_attention_D", "heads_RH", "before_mlp_D")),
        *((name, Weight) for name in ("inner", "outer", "gate_up", "down", "attention_gate")),
        *((name, POINTER) for name in ("inner_bias", "outer_bias", "gate_up_bias", "down_bias", "gate_bias")),
        *((name, POINTER) for name in ("recurrent", "keys_SGH", "values_SGH", "frequencies_R")),
        *((name, SIZE) for name in ("window", "pairs")),
        *((name, FLOAT) for name in ("attention_eps", "heads_eps", "mlp_eps")),
        *((name, FLOAT) for name in ("angle_scale", "mixed_scale", "mlp_scale")),
    )


class LayerRecords(NamedTuple):
    """The records of all layers, and what those point to.

    mixed, inner, channels, heads: the most numbers of a row in any layer."""

    layers: ctypes.Array[LayerRecord]
    recurrent: Sequence[RecurrentRecord]
    mixed: int
    inner: int
    channels: int
    heads: int
    features: int


def is_described(layer: DecoderLayer | HybridLayer, model: Decoder) -> bool:
    """Return whether C computes the layer."""
    attention, recurrent = layer.attention, layer.recurrent if isinstance(layer, HybridLayer) else None
    mlp = layer.mlp
    return (
        is_plain_norm(layer.before_attention)
        and is_plain_norm(layer.before_mlp)
        and all(type(one) in (UnchangedNorm, Scaled) for one in (layer.behind_attention, layer.behind_mlp))
        and not layer.parallel
        and (_attends_in_c(layer, model) if recurrent is None else attention is None and _recurs_in_c(recurrent))
        and type(mlp) is GatedMLP
        and mlp.shape.activation == "silu"
        and all(panels(one) is not None for one in layer.linears)
    )


def _attends_in_c(layer: DecoderLayer | HybridLayer, model: Decoder) -> bool:
    attention = layer.attention
    return (
        type(attention) in (SelfAttention, GatedAttention)
        and isinstance(attention, SelfAttention)
        and (layer.rotary is None or not model.rotaries[layer.rotary].interleaved)
        and (attention.head_norm is None or type(attention.head_norm) is HeadNorm)
    )


def _recurs_in_c(part: Recurrent) -> bool:
    if type(part) is Mamba2:
        return not part.shape.scales and part.shape.output_scale == 1.0
    return type(part) in (GatedDelta, ShortConvolution)


def is_plain_norm(norm: object) -> bool:
    """Return whether a norm is one that C computes."""
    return type(norm) is RMSNorm and norm.weight.dtype == torch.float32


def panels(linear: object) -> CompiledWeight | None:
    """Return a linear layer's weight if C multiplies by it.  Steps that need a feature's wrapping run elsewhere."""
    packed = linear.packed if isinstance(linear, Linear) else None
    plain = packed.plain if isinstance(packed, WrappedWeight) else packed
    return plain if isinstance(plain, CompiledWeight) else None


def weight_of(linear: object) -> Weight:
    """Return the weight of a linear layer that C computes."""
    found = panels(linear)
    assert found is not None
    return found.weight


def describe_layers(
    decoder: Decoder, pool: KVPool, windows: Sequence[int], states: RecurrentStates | None
) -> LayerRecords:
    """Return the records of a decoder's layers, all of which are described.  windows: of each layer with attention."""
    records, recurrent = [], []
    num_attentions = 0
    for layer in decoder.layers:
        record = _record_of(layer)
        if layer.attention is not None:
            _describe_attention(record, layer, decoder, pool, num_attentions, windows[num_attentions])
            num_attentions += 1
        else:
            assert isinstance(layer, HybridLayer)
            assert states is not None, "a rank of a model with recurrent layers has their states"
            one = _recurrent_record(layer.recurrent, states.layers[len(recurrent)], states.data.shape[1])
            recurrent.append(one)
            record.recurrent = ctypes.addressof(one)
        records.append(record)
    return LayerRecords(
        (LayerRecord * len(records))(*records),
        recurrent,
        mixed=max(one.outer.I for one in records),
        inner=max(max(one.inner.O, one.attention_gate.O) for one in records),
        channels=max((one.C for one in recurrent), default=0),
        heads=max((one.H for one in recurrent), default=0),
        features=max(one.down.I for one in records),
    )


def _record_of(layer: DecoderLayer | HybridLayer) -> LayerRecord:
    """Return a record with what does not depend on the kind of a layer's first half."""
    before_attention, before_mlp, mlp = layer.before_attention, layer.before_mlp, layer.mlp
    assert isinstance(before_attention, RMSNorm)
    assert isinstance(before_mlp, RMSNorm)
    assert isinstance(mlp, GatedMLP)
    inner, *_, outer = layer.products[0].linears
    linears = {"inner": inner, "outer": outer, "gate_up": mlp.gate_up, "down": mlp.down}
    return LayerRecord(
        before_attention_D=before_attention.weight.data_ptr(),
        before_mlp_D=before_mlp.weight.data_ptr(),
        attention_eps=before_attention.eps,
        mlp_eps=before_mlp.eps,
        angle_scale=1.0,
        mixed_scale=_factor(layer.behind_attention),
        mlp_scale=_factor(layer.behind_mlp),
        **{name: weight_of(linear) for name, linear in linears.items()},
        **{f"{name}_bias": _address(linear.bias) for name, linear in linears.items()},
    )


def _describe_attention(
    record: LayerRecord, layer: DecoderLayer | HybridLayer, decoder: Decoder, pool: KVPool, index: int, window: int
) -> None:
    attention = layer.attention
    assert isinstance(attention, SelfAttention)
    if layer.rotary is not None:
        rotary = decoder.rotaries[layer.rotary]
        record.frequencies_R, record.pairs = rotary.frequencies_R.data_ptr(), rotary.half
        record.angle_scale = rotary.scale
    if (heads := attention.head_norm) is not None:
        record.heads_RH, record.heads_eps = heads.weight.data_ptr(), heads.eps
    if isinstance(attention, GatedAttention):
        record.attention_gate, record.gate_bias = weight_of(attention.gate), _address(attention.gate.bias)
    record.keys_SGH, record.values_SGH = pool.keys(index).data_ptr(), pool.values(index).data_ptr()
    record.window = window


def _recurrent_record(part: Recurrent | None, states: tuple[Tensor, ...], slot_step: int) -> RecurrentRecord:
    assert isinstance(part, RecurrentPart)
    windows_NKC, *matrices = states
    convolution = _convolution_of(part)
    record = RecurrentRecord(
        kind=CONVOLUTION,
        taps_KC=convolution.weight_KC.data_ptr(),
        bias_C=_address(convolution.bias_C),
        windows_NKC=windows_NKC.data_ptr(),
        C=windows_NKC.shape[2],
        taps=windows_NKC.shape[1] + 1,
        slot_step=slot_step,
    )
    if matrices:
        (matrices_NHKU,) = matrices
        record.matrices_NHKU = matrices_NHKU.data_ptr()
        record.H, record.K, record.U = matrices_NHKU.shape[1:]
        record.G = (record.C - record.H * record.U) // (2 * record.K)
    if isinstance(part, GatedDelta):
        _describe_delta(record, part)
    elif isinstance(part, Mamba2):
        _describe_ssd(record, part)
    return record


def _describe_delta(record: RecurrentRecord, part: GatedDelta) -> None:
    record.kind, record.most, record.eps = DELTA, part.shape.most, part.shape.eps
    record.decay_H, record.bias_H, record.norm = map(Tensor.data_ptr, (part.decay_H, part.bias_A, part.norm_V))
    record.of_group = record.U


def _describe_ssd(record: RecurrentRecord, part: Mamba2) -> None:
    shape = part.shape
    record.kind, record.most, record.eps = SSD, shape.least_step, shape.eps
    record.decay_H, record.bias_H, record.skip_H = map(Tensor.data_ptr, (part.decay_H, part.bias_H, part.skip_H))
    record.norm, record.gated_first = _address(part.norm_I), shape.gated_first and part.norm_I is not None
    record.of_group = shape.inner_size // shape.num_groups
    record.norm_step = 0 if part.norm_I is None else record.of_group


def _convolution_of(part: RecurrentPart) -> CausalConvolution:
    assert isinstance(part, (GatedDelta, Mamba2, ShortConvolution))
    return part.convolution


def _factor(norm: object) -> float:
    return norm.factor if isinstance(norm, Scaled) else 1.0


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
