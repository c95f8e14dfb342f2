"""The shape of a decoder, part by part: a model family reads it from a checkpoint, and the model is built from it.

Each part is a record without torch; ``built_by`` names the class that computes it.  A family's file composes the parts;
``engine/plugins/model/`` has one file per family, and a family of another package may add parts of its own.

Owns: the parts, and how they form a decoder.  Does not know: torch, weights, ranks, config.json.
The file is long because the parts refer to each other, and a family's author finds them in one place.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal, Self

import msgspec
from msgspec.structs import replace

from engine.types.errors import ConfigError

# Features that a family may need of an attention backend besides causal attention with one window (``Declaration``).
SOFT_CAP, SINKS, LAYER_WINDOWS, LATENTS, CHUNKS = "soft_cap", "sinks", "layer_windows", "latents", "chunks"


class RotaryShape(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base frequencies, and how they are stretched to longer contexts.

    size: number of a head's first elements that rotate; 0 for all.
    interleaved: whether pairs are neighbours; otherwise they are half of the rotated elements apart.
    factor: by how much the context was extended.  original_max_len: its length before.
    low_freq_factor, high_freq_factor: for llama3.  beta_fast, beta_slow, truncate: for yarn.
    turned: for proportional, pairs that turn; the frequencies of the others are 0.
    factors: for longrope, a divisor for each pair.  short_factors: those in their place if no sequence is longer than
    original_max_len; () if they are the same (``DecoderShape.for_length``).
    attention_factor: factor of cos and sin.
    """

    kind: str = "default"
    theta: float = 10000.0
    size: int = 0
    interleaved: bool = False
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    truncate: bool = True
    turned: int = 0

    @property
    def is_short(self) -> bool:
        """Whether it has the factors of sequences that are at most ``original_max_len`` long, and not the others."""
        return self.factors == self.short_factors != ()

    def for_length(self, longest: int) -> "RotaryShape":
        """Return the embedding of sequences that all have at most ``longest`` tokens."""
        return (
            replace(self, factors=self.short_factors)
            if self.short_factors and longest <= self.original_max_len
            else self
        )


class PartShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part of a decoder.

    built_by: "module:callable", called with (shape, hidden_size, comm, device, dtype).  Its result has the methods
    ``pack(kernels)`` and ``slices(prefix)``, and those of its protocol in ``engine/layers/part.py``.
    """

    built_by: ClassVar[str] = ""

    @property
    def width(self) -> int:
        """Most numbers of a token inside of the part at once, over all ranks; a step's memory follows from it."""
        return 0

    @property
    def unlike_rounded(self) -> str:
        """The property of its tensors that formats of rounded weights cannot have; '' for none."""
        return ""


class MatrixRows(msgspec.Struct, frozen=True):
    """MatrixRows of a product, and their place in the matrix of a checkpoint that has them.

    name: of the matrix.  count: number of these rows.  total: rows of the matrix; 0 for no others.
    The matrix has ``groups`` equal parts, and each of them as many of these rows, from its row ``first`` on.
    units: parts of these rows that are not divided; 0 for as many as there are rows."""

    name: str
    count: int
    total: int = 0
    first: int = 0
    groups: int = 1
    units: int = 0

    @property
    def height(self) -> int:
        """Number of rows of the matrix."""
        return self.total or self.count


def stacked(name: str, counts: Sequence[int], groups: int = 1) -> tuple[MatrixRows, ...]:
    """Return the rows that a matrix has one after the other, in each of its groups."""
    starts = (sum(counts[:index]) // groups for index in range(len(counts)))
    return tuple(
        MatrixRows(name, count, sum(counts), first, groups) for count, first in zip(counts, starts, strict=True)
    )


class Unchanged(PartShape, frozen=True):
    """An absent norm."""

    built_by: ClassVar[str] = "engine.layers.norm:unchanged"


class Scaling(PartShape, frozen=True, kw_only=True):
    """A constant factor."""

    built_by: ClassVar[str] = "engine.layers.norm:scaled"
    factor: float


class RMSNormShape(PartShape, frozen=True, kw_only=True):
    """The norm x / sqrt(mean(x^2) + eps) * (offset + weight), Zhang and Sennrich 2019.  name: of its weight."""

    built_by: ClassVar[str] = "engine.layers.norm:rms_norm"
    name: str
    eps: float
    offset: float = 0.0


class RenewingShape(PartShape, frozen=True, kw_only=True):
    """A norm whose result, times ``factor``, takes the place of what the layer adds to."""

    built_by: ClassVar[str] = "engine.layers.norm:renewing"
    norm: RMSNormShape
    factor: float


class LayerNormShape(PartShape, frozen=True, kw_only=True):
    """The norm (x - mean) / sqrt(variance + eps) * (offset + weight) + bias, Ba et al. 2016."""

    built_by: ClassVar[str] = "engine.layers.norm:layer_norm"
    name: str
    eps: float
    bias: bool = True
    offset: float = 0.0


class HeadNormShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An RMS norm over each query head and over each key head.  query, key: names of their weights."""

    eps: float
    offset: float = 0.0
    query: str = "q_norm"
    key: str = "k_norm"


class HeadLengthShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An RMS norm without weights over each query head and over each key head.

    Rotation keeps a head's length, so this norm may come before it or after it."""

    eps: float


class WideHeadNormShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An RMS norm over all query heads together, and one over all key heads: q_norm and k_norm of OLMo 2."""

    eps: float


class HeadLayerNormShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A layer norm without a bias over each query head and each key head, which each have a weight of their own."""

    eps: float


class AttentionShape(PartShape, frozen=True, kw_only=True):
    """Grouped-query attention over paged keys and values.

    scale: factor of the scores; 0 for 1 / sqrt(head_size).  rotary: None for a layer without positions.
    window: tokens that a query sees, counted back and including itself; 0 for all.
    chunked: whether the window does not move along: a query sees the tokens of its own chunk of ``window`` tokens.
    soft_cap: scores become cap * tanh(score / cap); 0 for none.  sinks: whether each head has a learned extra score.
    merged: the one tensor that holds q, k and v, in this order; '' for one each.  transposed: tensors are [in, out].
    input_size: size of the input of queries, keys and values; 0 for the model's width.
    """

    built_by: ClassVar[str] = "engine.layers.self_attention:SelfAttention"
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary: RotaryShape | None
    scale: float = 0.0
    window: int = 0
    chunked: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    head_norm: HeadNormShape | HeadLengthShape | WideHeadNormShape | HeadLayerNormShape | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    name: str = "self_attn"
    merged: str = ""
    output: str = "o_proj"
    transposed: bool = False
    input_size: int = 0
    latent_size: ClassVar[int] = 0

    @property
    def inner(self) -> tuple[MatrixRows, MatrixRows, MatrixRows]:
        """The rows of queries, keys and values."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        if self.merged:
            query, key, value = stacked(self.merged, (queries, keys, keys))
            return query, key, value
        return MatrixRows("q_proj", queries), MatrixRows("k_proj", keys), MatrixRows("v_proj", keys)

    @property
    def unlike_rounded(self) -> str:
        return "matrices as [inputs, outputs]" if self.transposed else ""


class GatedAttentionShape(AttentionShape, frozen=True, kw_only=True):
    """Attention whose result is multiplied by a gate, sigmoid(gate(x)).

    ``q_proj`` has the gate's rows of each head behind its query's."""

    built_by: ClassVar[str] = "engine.layers.gated_attention:GatedAttention"

    @property
    def inner(self) -> tuple[MatrixRows, MatrixRows, MatrixRows]:
        queries = self.num_heads * self.head_size
        return stacked("q_proj", (queries, queries), self.num_heads)[0], *super().inner[1:]

    @property
    def gate(self) -> MatrixRows:
        """The rows of the gate."""
        queries = self.num_heads * self.head_size
        return stacked("q_proj", (queries, queries), self.num_heads)[1]


class LatentAttentionShape(PartShape, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-AI 2024): a token is stored as one latent, from which all heads' keys and
    values are computed, and one rotated key that all heads share.

    latent_size: of the latent.  rotary_size: of the rotated key, and of that part of a head's query; with rotary None
    neither rotates.
    plain_size: of the other part of a head's query.  value_size: of a head's value.
    query_rank: size of compressed queries; 0 for none.  scale: factor of the scores.
    bias: whether the products from the model's width and the output have biases.
    split: whether each head's map of latents is two tensors, to keys [latent_size, plain_size] and to values.
    """

    built_by: ClassVar[str] = "engine.layers.latent_attention:LatentAttention"
    num_heads: int
    latent_size: int
    rotary_size: int
    plain_size: int
    value_size: int
    rotary: RotaryShape | None
    scale: float
    eps: float
    query_rank: int = 0
    bias: bool = False
    split: bool = False
    name: str = "self_attn"
    window: ClassVar[int] = 0
    chunked: ClassVar[bool] = False
    soft_cap: ClassVar[float] = 0.0
    sinks: ClassVar[bool] = False
    num_kv_heads: ClassVar[int] = 1

    @property
    def head_size(self) -> int:
        """Size of a token's stored vector, and of the queries that are compared with it."""
        return self.latent_size + self.rotary_size


STATE_ALIGNMENT = 16  # numbers of a state, in float32: 64 bytes


def padded(sizes: Sequence[int]) -> int:
    """Return the numbers that a state of these sizes takes in its slot."""
    return -(-prod(sizes) // STATE_ALIGNMENT) * STATE_ALIGNMENT


def share(total: int, size: int, what: str) -> int:
    """Return one rank's part of ``total``.  Raises ConfigError if it cannot be divided evenly."""
    if total % size:
        raise ConfigError(f"the model has {what}={total}, which {size} ranks cannot share evenly")
    return total // size


class RecurrentShape(PartShape, frozen=True, kw_only=True):
    """A part that keeps a state of a row's tokens so far, of a size that does not grow with them."""

    name: str

    def of_rank(self, size: int) -> Self:
        """Return the shape of one rank's part, of ``size`` ranks.  Raises ConfigError if it is not to be divided."""
        if size > 1:
            what = type(self).__name__.removesuffix("Shape")
            raise ConfigError(f"device.tensor_parallel={size}: ranks cannot divide {what} layers; set it to 1")
        return self

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        """The rows of its first product."""
        return ()

    @property
    def between(self) -> tuple[tuple[int, MatrixRows], ...]:
        """Inputs and rows of the products between its first and its last one."""
        return ()

    @property
    def outer(self) -> tuple[str, int]:
        """Name and inputs of its last product."""
        raise NotImplementedError

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of each tensor of a row's state, which is float32."""
        raise NotImplementedError


class ShortConvolutionShape(RecurrentShape, frozen=True, kw_only=True):
    """The gated convolution of LFM2 over the last ``taps`` tokens, as wide as the model.  size: that width."""

    built_by: ClassVar[str] = "engine.layers.convolution:ShortConvolution"
    size: int
    taps: int
    bias: bool = False
    name: str = "conv"

    def of_rank(self, size: int) -> Self:
        return replace(self, size=share(self.size, size, "channels of its convolutions"))

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        return stacked("in_proj", (self.size,) * 3)

    @property
    def outer(self) -> tuple[str, int]:
        return "out_proj", self.size

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return ((self.taps - 1, self.size),)


Layout = Literal["joined", "grouped", "halved", "apart"]


class GatedDeltaShape(RecurrentShape, frozen=True, kw_only=True):
    """The gated delta rule (Yang et al. 2024) behind a convolution over ``taps`` tokens.

    num_heads: heads with a value; num_keys: heads with a key and a query, each shared by as many heads.
    key_size, value_size: of a head.  eps: of the norm behind.
    most: a token's factor of the rule is between 0 and so much; above 1 a key's value may change its sign.
    layout: how the tensors lie.  "joined": queries, keys and values are one; "grouped": gates too, by heads with a key;
    "halved": the gates z are apart from that, b and a are one, by heads with a key.  "apart": each is one, with a
    convolution of its own.
    """

    built_by: ClassVar[str] = "engine.layers.gated_delta:GatedDelta"
    num_heads: int
    num_keys: int
    key_size: int
    value_size: int
    taps: int
    eps: float
    most: float = 1.0
    layout: Layout = "joined"
    name: str = "linear_attn"

    def of_rank(self, size: int) -> Self:
        keys = share(self.num_keys, size, "linear_num_key_heads")
        return replace(self, num_keys=keys, num_heads=self.num_heads // self.num_keys * keys)

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        """Queries, keys and values, the gate z, and the numbers b and a of each head."""
        keys, heads, values = self.num_keys * self.key_size, self.num_heads, self.num_heads * self.value_size
        if self.layout == "apart":
            names = zip(self.gate_names, self.gates, strict=True)
            gates = tuple(MatrixRows(name, size) for name, size in names)
            return MatrixRows("q_proj", keys), MatrixRows("k_proj", keys), MatrixRows("v_proj", values), *gates
        if self.layout == "grouped":
            wide = stacked("in_proj_qkvz", (keys, keys, values, values), self.num_keys)
            return *wide, *stacked("in_proj_ba", (heads, heads), self.num_keys)
        parts = *stacked("in_proj_qkv", (keys, keys, values)), MatrixRows("in_proj_z", values)
        if self.layout == "halved":
            return *parts, *stacked("in_proj_ba", (heads, heads), self.num_keys)
        return *parts, MatrixRows("in_proj_b", heads), MatrixRows("in_proj_a", heads)

    @property
    def outer(self) -> tuple[str, int]:
        return "o_proj" if self.layout == "apart" else "out_proj", self.num_heads * self.value_size

    @property
    def gate_names(self) -> tuple[str, str, str]:
        """Names of what gives the gate z, and the numbers b and a, where queries, keys and values are apart."""
        return "g_proj", "b_proj", "a_proj"

    @property
    def gates(self) -> tuple[int, int, int]:
        """The first product's outputs for the gate z, and for b and a."""
        return self.num_heads * self.value_size, self.num_heads, self.num_heads

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Shape of the bias of the decays."""
        return (self.num_heads,)

    @property
    def norm(self) -> str:
        """Name of the norm behind the recurrence."""
        return "o_norm" if self.layout == "apart" else "norm"

    @property
    def convolved(self) -> tuple[MatrixRows, ...]:
        """The channels of the convolution: queries, keys and values."""
        keys, values = self.num_keys * self.key_size, self.num_heads * self.value_size
        if self.layout == "apart":
            return tuple(
                MatrixRows(f"{side}_conv1d", size) for side, size in zip("qkv", (keys, keys, values), strict=True)
            )
        return stacked("conv1d", (keys, keys, values))

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Shape of the stored rates of heads' decays."""
        return (self.num_heads,)

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_keys * self.key_size + self.num_heads * self.value_size

    @property
    def width(self) -> int:
        """The first product's size, and the keys of every head."""
        return self.channels + self.num_heads * (self.value_size + self.key_size)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return (self.taps - 1, self.channels), (self.num_heads, self.key_size, self.value_size)


class KimiDeltaShape(GatedDeltaShape, frozen=True, kw_only=True):
    """Kimi delta attention (Moonshot AI 2025): the gated delta rule with a decay for each number of a key.

    rank: size that gates and decays pass through between two products.  flat: whether rates of decays have one axis."""

    built_by: ClassVar[str] = "engine.layers.kimi_delta:KimiDelta"
    rank: int
    flat: bool = False

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        """Queries, keys, values, what gates and decays pass through, which is whole on each rank, and b."""
        *of_heads, gate, factors, decays = super().inner
        return *of_heads, replace(gate, units=1), factors, replace(decays, units=1)

    @property
    def gate_names(self) -> tuple[str, str, str]:
        return "g_a_proj", "b_proj", "f_a_proj"

    @property
    def gates(self) -> tuple[int, int, int]:
        return self.rank, self.num_heads, self.rank

    @property
    def between(self) -> tuple[tuple[int, MatrixRows], ...]:
        values, (decays,) = MatrixRows("g_b_proj", self.num_heads * self.value_size), self.bias_shape
        return (self.rank, values), (self.rank, MatrixRows("f_b_proj", decays))

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (self.num_heads * self.key_size,)

    @property
    def decay_shape(self) -> tuple[int, ...]:
        return (self.num_heads,) if self.flat else (1, 1, self.num_heads, 1)

    @property
    def width(self) -> int:
        """The first products' size, and twice the decays."""
        return self.channels + self.num_heads * (self.value_size + 3 * self.key_size)


class Mamba2Shape(RecurrentShape, frozen=True, kw_only=True):
    """A Mamba 2 layer (Dao and Gu 2024) behind a convolution over ``taps`` tokens.

    num_groups: keys and queries, each shared by as many heads, and groups of the norm.
    state_size: size of a key.  head_size: size of a value.
    normed: whether there is a norm behind; gated_first: whether it comes behind the gate.
    bias: of the first product; output_bias, conv_bias: of the last one and of the convolution.
    least_step: a token's step size is at least so large.
    scales: factors of the gate, values, keys, queries and step sizes that the first product gives; () for none.
    output_scale: factor of the result.
    """

    built_by: ClassVar[str] = "engine.layers.mamba2:Mamba2"
    num_heads: int
    num_groups: int
    head_size: int
    state_size: int
    taps: int
    eps: float
    normed: bool = True
    gated_first: bool = True
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    least_step: float = 0.0
    scales: tuple[float, ...] = ()
    output_scale: float = 1.0
    name: str = "mamba"

    def of_rank(self, size: int) -> Self:
        """Return the shape of one rank's part.  With fewer groups than ranks, neighbours have the same keys."""
        heads = share(self.num_heads, size, "mamba heads")
        if self.num_groups >= size:
            return replace(self, num_heads=heads, num_groups=share(self.num_groups, size, "mamba groups"))
        share(size, self.num_groups, "ranks over mamba groups")
        return replace(self, num_heads=heads, num_groups=1)

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        """The gate, values, keys, queries, and step sizes."""
        keys = self.num_groups * self.state_size
        gate, values, *shared, sizes = stacked(
            "in_proj", (self.inner_size, self.inner_size, keys, keys, self.num_heads)
        )
        return gate, values, *(replace(one, units=self.num_groups) for one in shared), sizes

    @property
    def convolved(self) -> tuple[MatrixRows, ...]:
        """The rows of the convolution's weights."""
        keys = self.num_groups * self.state_size
        values, *shared = stacked("conv1d", (self.inner_size, keys, keys))
        return values, *(replace(one, units=self.num_groups) for one in shared)

    @property
    def outer(self) -> tuple[str, int]:
        return "out_proj", self.inner_size

    @property
    def inner_size(self) -> int:
        """Size of all heads' values."""
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def width(self) -> int:
        """The first product's size, and the keys of every head."""
        return self.inner_size + self.channels + self.num_heads * self.state_size

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return (self.taps - 1, self.channels), (self.num_heads, self.state_size, self.head_size)


class LightningShape(RecurrentShape, frozen=True, kw_only=True):
    """Lightning attention (Qin et al. 2024): linear attention with decay, then a norm over all heads, and a gate.

    head_size: of a key and of a value.  rates: of the decay of each head.  eps: of the norm."""

    built_by: ClassVar[str] = "engine.layers.lightning:Lightning"
    num_heads: int
    head_size: int
    rates: tuple[float, ...]
    eps: float
    name: str = "self_attn"

    def of_rank(self, size: int) -> Self:
        return replace(self, num_heads=share(self.num_heads, size, "num_attention_heads"))

    @property
    def inner_size(self) -> int:
        """Size of all heads' values."""
        return self.num_heads * self.head_size

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        """Values, keys and queries, which a checkpoint has the other way round for each head, and the gate."""
        sides = stacked("qkv_proj", (self.inner_size,) * 3, self.num_heads)
        return *reversed(sides), MatrixRows("output_gate", self.inner_size)

    @property
    def outer(self) -> tuple[str, int]:
        return "out_proj", self.inner_size

    @property
    def width(self) -> int:
        """The first product's size, and what is activated of it."""
        return 7 * self.inner_size

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return ((self.num_heads, self.head_size, self.head_size),)


class MLPShape(PartShape, frozen=True, kw_only=True):
    """A plain MLP: down(activation(up(x))).  activation: as in ``GatedShape``, or relu2, the square of ReLU."""

    built_by: ClassVar[str] = "engine.layers.mlp:MLP"
    intermediate_size: int
    activation: str
    name: str = "mlp"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: bool = False
    transposed: bool = False

    @property
    def width(self) -> int:
        """Size between the two products."""
        return self.intermediate_size

    @property
    def unlike_rounded(self) -> str:
        return "matrices as [inputs, outputs]" if self.transposed else ""


class GatedShape(PartShape, frozen=True, kw_only=True):
    """A gated MLP: down(activation(gate(x)) * up(x)), Shazeer 2020.

    activation: silu; gelu (Hendrycks and Gimpel 2016) by the error function; gelu_pytorch_tanh, its approximation.
    merged: the one tensor that holds gate and up, in this order; '' for one each.
    gate, up, down: names of the products.
    """

    built_by: ClassVar[str] = "engine.layers.mlp:GatedMLP"
    intermediate_size: int
    activation: str
    name: str = "mlp"
    bias: bool = False
    merged: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def inner(self) -> tuple[MatrixRows, ...]:
        """The rows of the gate and of what it multiplies."""
        size = self.intermediate_size
        return (
            stacked(self.merged, (size, size))
            if self.merged
            else (MatrixRows(self.gate, size), MatrixRows(self.up, size))
        )

    @property
    def width(self) -> int:
        """Size between the products."""
        return self.intermediate_size


class ScaledGatedShape(GatedShape, frozen=True, kw_only=True):
    """A gated MLP whose gate is multiplied by ``gate_scale`` before its activation."""

    built_by: ClassVar[str] = "engine.layers.mlp:ScaledGatedMLP"
    gate_scale: float


class RouterShape(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a token's experts and their weights: a product gives each expert's score, and the highest win.

    scoring: "softmax" over all experts, or "sigmoid" of each.  normalised: the weights are scaled to a sum of 1.
    corrected: a learned number per expert is added to its score for the choice, but not for the weight.
    correction: name of these numbers below the experts; '' for one below the router.
    num_groups: number of groups of experts; the chosen come from the num_chosen_groups best: those with the highest
    score, or the highest sum of two if ``corrected``.  scale: factor of the weights.  exact: compute in float32.
    """

    name: str = "gate"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    bias: bool = False
    corrected: bool = False
    correction: str = ""
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    exact: bool = False

    @property
    def by_scores(self) -> bool:
        """Whether the weights follow from the scores of the chosen experts alone."""
        if self.scoring == "softmax":
            return self.normalised and not self.corrected
        return not self.normalised and not self.corrected


class ExpertsShape(PartShape, frozen=True, kw_only=True):
    """A mixture of experts: a router sends each token to some of many gated MLPs; their weighted results are summed.

    shared_size: size of a further expert, for all tokens and without a weight; 0 for none.  shared: its name.
    shared_gate: name of a product to one number, whose sigmoid is that expert's weight; '' for none.
    weighs_inputs: whether the weights of experts multiply what enters them, not their results.
    beside: an MLP for all tokens whose tensors have names of their own; None for none.
    activation: as in ``GatedShape``; or "clamped_swish" of gpt-oss, with ``limit`` and ``slope``.
    stacked: all experts of a layer are one tensor [experts, in, out], with gate and up interleaved, and with biases;
    if ``halved``, with gate before up, and without biases; if ``upright``, it is [experts, out, in].
    stacks: names of the stacked tensors.
    gate, up, down: names of the products, if each expert has its own tensors.  Without a gate, '', an expert is a plain
    MLP, as in ``MLPShape``.
    divided: whether a rank has some of the experts whole, instead of a part of each.
    exchanged: whether such ranks send only the results that they have, in steps that are not captured.
    four_bits: whether a GPU multiplies by the stacks as MXFP4 has them, and never has them as floats.
    float8: whether a GPU multiplies by each expert's float8 elements as the file has them, with a scale per block.
    """

    built_by: ClassVar[str] = "engine.layers.experts:Experts"
    num_experts: int
    num_chosen: int
    expert_size: int
    activation: str
    router: RouterShape
    shared_size: int = 0
    name: str = "mlp"
    stacked: bool = False
    halved: bool = False
    upright: bool = False
    shared: str = "shared_experts"
    shared_gate: str = ""
    beside: "GatedShape | None" = None
    stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    weighs_inputs: bool = False
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    limit: float = 0.0
    slope: float = 1.0
    divided: bool = False
    exchanged: bool = False
    four_bits: bool = False
    float8: bool = False

    @property
    def width(self) -> int:
        """Size between the products, over all of a token's experts."""
        return self.num_chosen * self.expert_size + self.shared_size

    @property
    def unlike_rounded(self) -> str:
        return "all experts in one tensor" if self.stacked else ""


class NoHeadShape(PartShape, frozen=True):
    """No head, for a model whose output is its last states."""

    built_by: ClassVar[str] = "engine.layers.task_head:NoHead"


class ClassifierShape(PartShape, frozen=True, kw_only=True):
    """A head with a logit for each of ``num_labels`` labels.  name: of its weight."""

    built_by: ClassVar[str] = "engine.layers.task_head:Classifier"
    num_labels: int
    name: str = "score"


class RewardShape(PartShape, frozen=True, kw_only=True):
    """A head with one logit from an MLP as wide as the model, out(relu(inner(x))), with biases.

    inner, out: names of the products."""

    built_by: ClassVar[str] = "engine.layers.task_head:Reward"
    inner: str = "score.0"
    out: str = "score.2"


class TokenScoreShape(PartShape, frozen=True, kw_only=True):
    """A head with the logit of one token, minus that of a second one if there are two.

    name: of the table of ``vocab_size`` rows that would be the LM head.
    scale, cap: ``logit_scale`` and ``logit_cap`` of the decoder."""

    built_by: ClassVar[str] = "engine.layers.task_head:TokenScore"
    token_ids: tuple[int, ...]
    vocab_size: int
    name: str = "lm_head"
    scale: float = 1.0
    cap: float = 0.0


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: x += behind_attention(attention(before_attention(x))), then the same with the MLP.

    attention, mlp: None for a layer without it.
    recurrent: a part in place of attention; if there is attention, too, beside it: both have the same input, and their
    results are added.
    parallel: the MLP has the same input as attention, before_attention(x), and both results are added to x (Wang and
    Komatsuzaki 2021); before_mlp is not used then."""

    attention: AttentionShape | LatentAttentionShape | None
    mlp: PartShape | None
    recurrent: RecurrentShape | None = None
    before_attention: PartShape = Unchanged()
    behind_attention: PartShape = Unchanged()
    before_mlp: PartShape = Unchanged()
    behind_mlp: PartShape = Unchanged()
    parallel: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the layer has attention without a gate and an MLP, and nothing beside them."""
        attends = self.attention is not None and not isinstance(self.attention, GatedAttentionShape)
        return attends and self.mlp is not None and self.recurrent is None


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a checkpoint's tensors; a layer's index follows ``layers``.

    modules: beginnings or middles of names, each with what transformers' modules have in its place."""

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    head: str = "lm_head"
    modules: tuple[tuple[str, str], ...] = ()

    def spellings(self, name: str) -> tuple[str, ...]:
        """Return a name, and that of the same module in transformers if it is another one."""
        return name, *(name.replace(own, theirs, 1) for own, theirs in self.modules if own in name)


class PredictorShape(msgspec.Struct, frozen=True, kw_only=True):
    """A layer behind the last one that predicts one token further than the LM head (DeepSeek-AI 2024).

    It reads a state that the LM head reads, and the token after it: the layer's input is the product ``fuse`` of the
    norms of the token's embedding and of the state.  What ``norm`` makes of its result goes to the model's LM head.
    stem: what the names of all its tensors begin with.  prefix: of those of the layer.  The other names are whole.
    unread: patterns of those that are not read: copies of the model's tables."""

    stem: str
    prefix: str
    layer: LayerShape
    embedding_norm: PartShape
    state_norm: PartShape
    fuse: str
    norm: PartShape
    unread: tuple[str, ...] = (r"\.(embed_tokens|shared_head\.head)\.weight$",)

    @property
    def pattern(self) -> str:
        """A pattern of the names of its tensors."""
        return rf"^{re.escape(self.stem)}\."


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: embedding, layers, a norm, the LM head.  At least one layer has attention.

    built_by: as in ``PartShape``, called with (shape, comm, device, dtype); it returns a ``Model``.
    max_len: tokens of the longest sequence.  tied: whether the LM head is the embedding table.
    embedding_scale: factor of the embedding.  rounded_scale: whether it is rounded to the model's dtype first.
    learned_positions: rows of a table of positions that is added to the embedding; 0 for none.
    logit_scale: factor of the logits.  logit_cap: caps logits as ``AttentionShape.soft_cap`` caps scores.
    unread: patterns for the names of stored tensors that are not read.
    task_head: head in place of the LM head; None for the LM head.  A family sets it if labels have another name than
    in transformers; for other models it follows from the checkpoint's files.
    predictor: a layer for drafts, which is not built; None for none.
    """

    built_by: ClassVar[str] = "engine.models.decoder:Decoder"
    vocab_size: int
    hidden_size: int
    max_len: int
    layers: tuple[LayerShape, ...]
    norm: PartShape
    tied: bool = False
    embedding_scale: float = 1.0
    rounded_scale: bool = False
    learned_positions: int = 0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    unread: tuple[str, ...] = ()
    names: Names = Names()
    task_head: PartShape | None = None
    predictor: PredictorShape | None = None

    @property
    def num_outputs(self) -> int:
        """Number of logits per row: the vocabulary, or 1 for a model that generates nothing."""
        return self.vocab_size if self.task_head is None else 1

    @property
    def input_width(self) -> int:
        """Numbers of a token that layers read besides its embedding."""
        return 0

    @property
    def unlike_rounded(self) -> str:
        """The reason that its weights cannot be read from a rounded checkpoint (``PartShape``); '' if they can."""
        parts = (part for layer in self.layers for part in (layer.attention, layer.recurrent, layer.mlp) if part)
        return next((part.unlike_rounded for part in parts if part.unlike_rounded), "")

    @property
    def experts(self) -> list[ExpertsShape]:
        """The mixtures of experts, in the order of layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsShape)]

    def with_experts(self, **changes: bool) -> "DecoderShape":
        """Return the shape with other settings of its mixtures of experts."""
        layers = [
            replace(layer, mlp=replace(layer.mlp, **changes)) if isinstance(layer.mlp, ExpertsShape) else layer
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))

    def for_length(self, longest: int) -> Self:
        """Return the shape that serves sequences of at most ``longest`` tokens; 0 for all that it was trained for.

        With longrope all tokens have the short factors, or all have the long ones: a sequence that came to need the
        others would change its keys, and those of pages that it shares."""
        if not longest or longest >= self.max_len or not any(one.short_factors for one in self.rotaries):
            return self
        layers = []
        for layer in self.layers:
            attention = layer.attention
            if attention is not None and attention.rotary is not None:
                attention = replace(attention, rotary=attention.rotary.for_length(longest))
            layers.append(replace(layer, attention=attention))
        shape = replace(self, layers=tuple(layers))
        return replace(
            shape, max_len=min([self.max_len, *(one.original_max_len for one in shape.rotaries if one.is_short)])
        )

    @property
    def rotaries(self) -> tuple[RotaryShape, ...]:
        """The rotary embedding of each layer that has one."""
        return tuple(one.rotary for one in self.attentions if one.rotary is not None)

    @property
    def attentions(self) -> tuple[AttentionShape | LatentAttentionShape, ...]:
        """The attention of each layer that has it, which has its keys and values."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def recurrents(self) -> tuple[RecurrentShape, ...]:
        """The recurrent part of each layer that has one."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def state_bytes(self) -> int:
        """Memory of one row's states, all float32; 0 without recurrent layers."""
        return 4 * sum(padded(sizes) for one in self.recurrents for sizes in one.states)

    def states_of_rank(self, size: int) -> list[tuple[tuple[int, ...], ...]]:
        """The sizes of a row's states on one of ``size`` ranks, by recurrent layer."""
        return [one.of_rank(size).states for one in self.recurrents]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads over all ranks, the same in every layer."""
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads over all ranks, the same in every layer: they share pages."""
        return self.attentions[0].num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head, the same in every layer."""
        return self.attentions[0].head_size

    @property
    def intermediate_size(self) -> int:
        """Width of the widest MLP or recurrent part."""
        return max(part.width for layer in self.layers for part in (layer.mlp, layer.recurrent) if part is not None)

    @property
    def window(self) -> int:
        """Window of the layers that have one; 0 if there are none."""
        return max(one.window for one in self.attentions)

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer of ``attentions`` sees only a window."""
        return tuple(one.window > 0 for one in self.attentions)

    @property
    def first_window_layer(self) -> int:
        """Index in ``attentions`` of the first layer with the window; 0 if there is none.

        ``full_layers`` are exceptions after it."""
        return self.windowed.index(True) if self.window else 0

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers after ``first_window_layer`` that see everything."""
        first = self.first_window_layer
        return (
            tuple(index for index, one in enumerate(self.windowed) if index > first and not one) if self.window else ()
        )

    @property
    def attention_needs(self) -> tuple[str, ...]:
        """Features that the model needs of its attention backend."""
        attentions = self.attentions
        needs = {
            SOFT_CAP: any(one.soft_cap for one in attentions),
            SINKS: any(one.sinks for one in attentions),
            LAYER_WINDOWS: bool(self.full_layers),
            LATENTS: any(one.latent_size for one in attentions),
            CHUNKS: any(one.chunked for one in attentions),
        }
        return tuple(name for name, needed in needs.items() if needed)
