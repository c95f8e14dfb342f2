"""Decode steps on a CPU, each by one call of C: rows in, logits or the next tokens out.

Legend: B decode rows · D model dim · S slots of the pool · N rows of the engine · M tokens, W pages of a row
Owns: which decoders the call computes, the weights, pages and rows that it gets.  Does not know: what is computed.

A call of an operation of a small model's layer costs more than its computation, and so does the layout of a step.
"""

import ctypes
from itertools import pairwise

import numpy as np
import torch

from engine.execution.batch import Int32, Int64
from engine.execution.captured_steps import Decoded
from engine.execution.rows import DeviceRows
from engine.kernels.attention import CompiledAttention
from engine.kernels.compiled import compiled
from engine.kernels.panels import CompiledWeight, Weight
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.linear import Linear, VocabLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import HeadNorm, RMSNorm, UnchangedNorm
from engine.layers.packing import WrappedWeight
from engine.layers.rotary import Rotary
from engine.layers.self_attention import SelfAttention
from engine.messages import Step
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.hybrid_layer import HybridLayer
from engine.sampling.captured import SamplingVariant
from engine.sampling.sampler import Sampler

NO_MEMORY, WRONG_TOKEN, WRONG_ROW = 1, 2, 3  # results of ``decode``; 0 for success
POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Layer(ctypes.Structure):
    """A layer as ``decodes.c`` defines it.  The code that fills it keeps the tensors that it points to."""

    _fields_ = (
        *((name, POINTER) for name in ("before_attention_D", "heads_RH", "before_mlp_D")),
        *((name, Weight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, POINTER) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((name, POINTER) for name in ("keys_SGH", "values_SGH", "frequencies_R")),
        ("window", SIZE),
        *((name, FLOAT) for name in ("attention_eps", "heads_eps", "mlp_eps", "angle_scale")),
    )


class DecoderStack(ctypes.Structure):
    """All layers of a decoder, the parts before and after them, and the tables of rows."""

    _fields_ = (
        *((name, POINTER) for name in ("layers", "embedding_VD", "norm_D")),
        *((name, Weight) for name in ("table", "head")),
        *((name, POINTER) for name in ("attention", "tokens_NM", "pages_NW")),
        *((name, SIZE) for name in ("num_layers", "V", "D", "I", "S", "N", "M", "W", "widest")),
        *((name, FLOAT) for name in ("embedding_scale", "norm_eps")),
    )


class CompiledDecodes:
    """Decode steps of any number of rows, with torch's number of threads, while no tap reads states."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, attention: CompiledAttention, rows: DeviceRows, sampler: Sampler
    ) -> None:
        library = compiled()
        assert library is not None, "attention has kernels, and they are not compiled"
        self._decode = library.decode
        self._decode.argtypes, self._decode.restype = [*[POINTER] * 3, SIZE, *[POINTER] * 2, SIZE, POINTER], SIZE
        self._wrong = SIZE()
        self._decoder = decoder
        self._pool = pool
        self._rows = rows
        self._sampler = sampler
        self._windows, self._widest = attention.windows, attention.widest
        self._attention = attention.another()
        self.describe()
        self._logits_BV = torch.empty((1, self._stack.head.O))

    def describe(self) -> None:
        """Read the places of the decoder's weights; called again if it has others."""
        decoder, pool, rows = self._decoder, self._pool, self._rows
        self._layers = (Layer * len(decoder.layers))(
            *(_described(index, decoder, pool, self._windows[index]) for index in range(len(decoder.layers)))
        )
        table, norm, mlp = decoder.embedding, decoder.norm, decoder.layers[0].mlp
        plain_VD = getattr(table, "weight", None)
        assert isinstance(mlp, GatedMLP)
        assert isinstance(norm, RMSNorm)
        (num_rows, row_len), width = rows.tokens_RM.shape, rows.pages_RP.shape[1]
        self._stack = DecoderStack(
            layers=ctypes.addressof(self._layers),
            embedding_VD=None if plain_VD is None else plain_VD.data_ptr(),
            norm_D=norm.weight.data_ptr(),
            table=Weight() if plain_VD is not None else _weight(table),
            head=_weight(decoder.head),
            attention=ctypes.addressof(self._attention.step),
            tokens_NM=rows.tokens_RM.data_ptr(),
            pages_NW=rows.pages_RP.data_ptr(),
            num_layers=len(self._layers),
            V=table.rows,
            D=norm.weight.shape[0],
            I=mlp.down.inputs,
            S=len(pool.keys(0)),
            N=num_rows,
            M=row_len,
            W=width,
            widest=self._widest,
            embedding_scale=decoder.embedding_scale,
            norm_eps=norm.eps,
        )

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a call for so many rows."""
        return num_rows > 0 and self._decoder.tap is None

    def variant_of(self, rows_N: Int64, positions_N: Int64) -> SamplingVariant:
        """Return how a step of these rows will be sampled."""
        return SamplingVariant.GREEDY if self._sampler.takes_likeliest(rows_N, positions_N) else SamplingVariant.LOGITS

    def apply(self, step: Step) -> None:
        """Take in the changes since the last step."""
        self._rows.apply(step)

    def launch(self, rows_N: Int64, lengths_N: Int32, variant: SamplingVariant) -> Decoded:
        """Run the step; it is done when this returns.

        Raises MemoryError, and IndexError for a row that cannot exist."""
        num = len(rows_N)
        if num > len(self._logits_BV):
            self._logits_BV = torch.empty((num, self._logits_BV.shape[1]))
        rows_N, lengths_N = np.ascontiguousarray(rows_N, np.int64), np.ascontiguousarray(lengths_N, np.int32)
        write_at_N = torch.from_numpy(rows_N * self._rows.tokens_RM.shape[1] + lengths_N)
        threads = torch.get_num_threads()
        self._attention.have_scratch(threads)
        token_ids_N = torch.empty(num, dtype=torch.int64) if variant is SamplingVariant.GREEDY else None
        failed = self._decode(
            ctypes.addressof(self._stack),
            rows_N.ctypes.data,
            lengths_N.ctypes.data,
            num,
            self._logits_BV.data_ptr(),
            None if token_ids_N is None else token_ids_N.data_ptr(),
            threads,
            ctypes.addressof(self._wrong),
        )
        if failed:
            raise self._error(failed, rows_N, lengths_N)
        logits_NV = self._logits_BV[:num] if token_ids_N is None else None
        return Decoded(token_ids_N, None, logits_NV, write_at_N)

    def _error(self, failed: int, rows_N: Int64, lengths_N: Int32) -> MemoryError | IndexError:
        if failed == NO_MEMORY:
            return MemoryError(f"no memory for a step of {len(rows_N)} rows")
        row, length, stack = int(rows_N[self._wrong.value]), int(lengths_N[self._wrong.value]), self._stack
        if failed == WRONG_TOKEN:
            token = int(self._rows.tokens_RM[row, length - 1])
            return IndexError(f"token {length - 1} of row {row}, {token}, is not among the model's {stack.V}")
        assert failed == WRONG_ROW, f"decode returned {failed}"
        return IndexError(
            f"row {row} with {length} tokens is not among the {stack.N}, is longer than its {stack.W} pages, or has a "
            f"page that is not among the pool's {self._attention.step.num_pages}"
        )


def compiled_decodes(
    model: object, pool: KVPool, attention: AttentionBackend, rows: DeviceRows, sampler: Sampler, comm: Comm
) -> CompiledDecodes | None:
    """Return decode steps in C, or None if C does not compute what the model does, or is missing."""
    if type(model) is not Decoder or not isinstance(attention, CompiledAttention) or comm.size > 1:
        return None  # a decoder that a plugin has derived from this one may compute something else
    if not _ends_are_described(model) or not all(_is_described(layer, model) for layer in model.layers):
        return None
    if any(_inputs(one) != _inputs(other) for one, other in pairwise(model.layers)):
        return None
    return CompiledDecodes(model, pool, attention, rows, sampler)


def _ends_are_described(model: Decoder) -> bool:
    shape, head = model.shape, model.head
    return (
        model.positions is None
        and _is_plain(model.norm)
        and isinstance(head, VocabLinear)
        and _panels(head) is not None
        and shape.logit_scale == 1.0
        and not shape.logit_cap
    )


def _is_described(layer: DecoderLayer | HybridLayer, model: Decoder) -> bool:
    if not isinstance(layer, DecoderLayer):
        return False
    attention, mlp = layer.attention, layer.mlp
    nothing_behind = type(layer.behind_attention) is type(layer.behind_mlp) is UnchangedNorm
    return (
        _is_plain(layer.before_attention)
        and _is_plain(layer.before_mlp)
        and nothing_behind
        and not layer.parallel
        and layer.rotary is not None
        and model.rotaries[layer.rotary].whole
        and type(attention) is SelfAttention
        and (attention.head_norm is None or type(attention.head_norm) is HeadNorm)
        and type(mlp) is GatedMLP
        and mlp.shape.activation == "silu"
        and all(_panels(one) is not None for one in layer.linears)
    )


def _is_plain(norm: object) -> bool:
    return type(norm) is RMSNorm and norm.weight.dtype == torch.float32


def _inputs(layer: DecoderLayer | HybridLayer) -> list[int]:
    return [weight.inputs for linear in layer.linears if (weight := _panels(linear)) is not None]


def _panels(linear: object) -> CompiledWeight | None:
    """Return a linear layer's weight if C multiplies by it.  Steps that need a feature's wrapping run elsewhere."""
    packed = linear.packed if isinstance(linear, Linear) else None
    plain = packed.plain if isinstance(packed, WrappedWeight) else packed
    return plain if isinstance(plain, CompiledWeight) else None


def _described(index: int, decoder: Decoder, pool: KVPool, window: int) -> Layer:
    layer = decoder.layers[index]
    attention, mlp, before_attention, before_mlp = layer.attention, layer.mlp, layer.before_attention, layer.before_mlp
    assert isinstance(attention, SelfAttention)
    assert isinstance(mlp, GatedMLP)
    assert isinstance(before_attention, RMSNorm)
    assert isinstance(before_mlp, RMSNorm)
    assert layer.rotary is not None
    rotary: Rotary = decoder.rotaries[layer.rotary]
    heads = attention.head_norm
    products = {"qkv": attention.qkv, "output": attention.output_linear, "gate_up": mlp.gate_up, "down": mlp.down}
    return Layer(
        before_attention_D=before_attention.weight.data_ptr(),
        heads_RH=None if heads is None else heads.weight.data_ptr(),
        before_mlp_D=before_mlp.weight.data_ptr(),
        keys_SGH=pool.keys(index).data_ptr(),
        values_SGH=pool.values(index).data_ptr(),
        frequencies_R=rotary.frequencies_R.data_ptr(),
        window=window,
        attention_eps=before_attention.eps,
        heads_eps=0.0 if heads is None else heads.eps,
        mlp_eps=before_mlp.eps,
        angle_scale=rotary.scale,
        **{name: _weight(linear) for name, linear in products.items()},
        **{f"{name}_bias": None if one.bias is None else one.bias.data_ptr() for name, one in products.items()},
    )


def _weight(linear: object) -> Weight:
    panels = _panels(linear)
    assert panels is not None
    return panels.weight
