"""The shape of a decoder, part by part: what a model family says of a checkpoint, and what the model is built from.

Each part is a record without torch; ``built_by`` names the class that computes it.  A family's file puts the parts
together, ``engine/plugins/model/`` has one for each, and a family of another package may bring parts of its own.

Owns: the parts, and how a decoder is made of them.  Does not know: torch, weights, ranks, config.json.
It is long because the parts refer to each other, and a family's author finds them in one place.
"""

from typing import ClassVar, Literal

import msgspec

# What a family may demand of an attention backend beside causal attention with one window; see ``Declaration``.
SOFT_CAP, SINKS, LAYER_WINDOWS, LATENTS = "soft_cap", "sinks", "layer_windows", "latents"


class RotaryShape(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base frequencies and how they are stretched to longer contexts.

    size: how many of a head's numbers are turned, the first ones; 0 for all.  interleaved: pairs are neighbours, not
    half of the turned numbers apart.
    factor: by how much the context was extended.  original_max_len: what it was extended from.
    low_freq_factor, high_freq_factor: llama3.  beta_fast, beta_slow, truncate: yarn.  factors: longrope, a divisor for
    each pair.  attention_factor multiplies cos and sin.
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
    attention_factor: float = 1.0
    truncate: bool = True


class PartShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part of a decoder.

    built_by: "module:callable", called with (shape, hidden_size, comm, device, dtype).  What it returns has
    ``pack(kernels)`` and ``slices(prefix)`` beside what its place in the layer asks for, see ``engine/layers/part.py``.
    """

    built_by: ClassVar[str] = ""

    @property
    def width(self) -> int:
        """How many numbers of a token there are within it at once, over all ranks: what a step's memory is made of."""
        return 0

    @property
    def unlike_rounded(self) -> str:
        """What sets its tensors apart from those that formats of rounded weights know; '' for nothing."""
        return ""


class Unchanged(PartShape, frozen=True):
    """The place of a norm that a family does not have."""

    built_by: ClassVar[str] = "engine.layers.norm:unchanged"


class Scaling(PartShape, frozen=True, kw_only=True):
    """A constant factor."""

    built_by: ClassVar[str] = "engine.layers.norm:scaled"
    factor: float


class RMSNormShape(PartShape, frozen=True, kw_only=True):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), Zhang and Sennrich 2019.  name: of its weight, in its layer."""

    built_by: ClassVar[str] = "engine.layers.norm:rms_norm"
    name: str
    eps: float
    offset: float = 0.0


class LayerNormShape(PartShape, frozen=True, kw_only=True):
    """(x - mean) / sqrt(variance + eps) * weight + bias, Ba et al. 2016."""

    built_by: ClassVar[str] = "engine.layers.norm:layer_norm"
    name: str
    eps: float
    bias: bool = True


class HeadNormShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An RMS norm over each query head and each key head by itself: q_norm and k_norm."""

    eps: float
    offset: float = 0.0


class WideHeadNormShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An RMS norm over all query heads at once, and one over all key heads: q_norm and k_norm of OLMo 2."""

    eps: float


class HeadLayerNormShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A layer norm, without a bias, over each query head and each key head by itself, each with a weight of its own."""

    eps: float


class AttentionShape(PartShape, frozen=True, kw_only=True):
    """Grouped-query attention over paged keys and values.

    scale: multiplies the scores; 0 for 1 / sqrt(head_size).  rotary: None for a layer without positions.
    window: how many tokens back a query sees, itself included, 0 for all.
    soft_cap: scores become cap * tanh(score / cap); 0 for none.  sinks: a learned score of each head, of no key.
    merged: the one tensor that holds q, k and v, in this order; '' for one each.  transposed: tensors are [in, out].
    input_size: numbers of a token that queries, keys and values are made from; 0 for the model's width.
    """

    built_by: ClassVar[str] = "engine.layers.self_attention:SelfAttention"
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary: RotaryShape | None
    scale: float = 0.0
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    head_norm: HeadNormShape | WideHeadNormShape | HeadLayerNormShape | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    name: str = "self_attn"
    merged: str = ""
    output: str = "o_proj"
    transposed: bool = False
    input_size: int = 0
    latent_size: ClassVar[int] = 0

    @property
    def unlike_rounded(self) -> str:
        return "matrices as [inputs, outputs]" if self.transposed else ""


class LatentAttentionShape(PartShape, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-AI 2024): of a token one latent is kept, from which all heads' keys and
    values are made, and one key with its position, which all heads share.

    latent_size, rotary_size: of these.  plain_size: of the part of a head's query without positions; rotary_size: of
    the other.  value_size: of a head.  query_rank: queries are made through so few numbers; 0 for straight.
    scale: multiplies the scores.  bias: of the products from the model's width, and of the output.
    """

    built_by: ClassVar[str] = "engine.layers.latent_attention:LatentAttention"
    num_heads: int
    latent_size: int
    rotary_size: int
    plain_size: int
    value_size: int
    rotary: RotaryShape
    scale: float
    eps: float
    query_rank: int = 0
    bias: bool = False
    name: str = "self_attn"
    window: ClassVar[int] = 0
    soft_cap: ClassVar[float] = 0.0
    sinks: ClassVar[bool] = False
    num_kv_heads: ClassVar[int] = 1

    @property
    def head_size(self) -> int:
        """Of what is kept of a token, and of the queries that are compared with it."""
        return self.latent_size + self.rotary_size


class MLPShape(PartShape, frozen=True, kw_only=True):
    """down(activation(up(x))); see ``GatedShape``."""

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
        """Between the two products."""
        return self.intermediate_size

    @property
    def unlike_rounded(self) -> str:
        return "matrices as [inputs, outputs]" if self.transposed else ""


class GatedShape(PartShape, frozen=True, kw_only=True):
    """down(activation(gate(x)) * up(x)), Shazeer 2020.

    activation: silu; gelu (Hendrycks and Gimpel 2016) by the error function; gelu_pytorch_tanh, its approximation.
    merged: the one tensor that holds gate and up, in this order; '' for one each.
    """

    built_by: ClassVar[str] = "engine.layers.mlp:GatedMLP"
    intermediate_size: int
    activation: str
    name: str = "mlp"
    bias: bool = False
    merged: str = ""

    @property
    def width(self) -> int:
        """Between the products."""
        return self.intermediate_size


class RouterShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a token's experts are chosen, and their weights: a product, a score for each expert, the highest scores.

    scoring: "softmax" over all experts, or "sigmoid" of each.  normalised: the weights are scaled to a sum of 1.
    corrected: a number of each expert is added to its score to choose by, but not to its weight.
    num_groups: experts are in so many groups, and come from the num_chosen_groups best: those with the highest score,
    or with the highest sum of two if ``corrected``.  scale: multiplies the weights.  exact: all of it in float32.
    """

    name: str = "gate"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    bias: bool = False
    corrected: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    exact: bool = False


class ExpertsShape(PartShape, frozen=True, kw_only=True):
    """A router sends each token to some of many gated MLPs, whose results are added up by its weights.

    shared_size: of one more, for all tokens and without a weight; 0 for none.
    activation: as of ``GatedShape``; or "clamped_swish", gpt-oss's, with ``limit`` and ``slope``.
    stacked: all experts of a layer in one tensor [experts, in, out], gate and up interleaved, with biases.
    gate, up, down: their names, with one tensor for each expert.
    divided: a rank has some of the experts whole, not a part of each.
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
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    limit: float = 0.0
    slope: float = 1.0
    divided: bool = False

    @property
    def width(self) -> int:
        """Between the products, of all of a token's experts."""
        return self.num_chosen * self.expert_size + self.shared_size

    @property
    def unlike_rounded(self) -> str:
        return "all experts in one tensor" if self.stacked else ""


class NoHeadShape(PartShape, frozen=True):
    """In the LM head's place: nothing, for a model whose last states are all that is wanted."""

    built_by: ClassVar[str] = "engine.layers.pooled_head:NoHead"


class ClassifierShape(PartShape, frozen=True, kw_only=True):
    """In the LM head's place: a logit for each of ``num_labels`` labels.  name: of its weight."""

    built_by: ClassVar[str] = "engine.layers.pooled_head:Classifier"
    num_labels: int
    name: str = "score"


class RewardShape(PartShape, frozen=True, kw_only=True):
    """In the LM head's place: one logit of an MLP as wide as the model, out(relu(inner(x))), with biases.

    inner, out: their names."""

    built_by: ClassVar[str] = "engine.layers.pooled_head:Reward"
    inner: str = "score.0"
    out: str = "score.2"


class TokenScoreShape(PartShape, frozen=True, kw_only=True):
    """In the LM head's place: the logit of one token, less that of a second where there is one.

    name: of the table of ``vocab_size`` rows that would be the LM head.  scale, cap: ``logit_scale`` and ``logit_cap``
    of the decoder."""

    built_by: ClassVar[str] = "engine.layers.pooled_head:TokenScore"
    token_ids: tuple[int, ...]
    vocab_size: int
    name: str = "lm_head"
    scale: float = 1.0
    cap: float = 0.0


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: x += behind_attention(attention(before_attention(x))), then the same with the MLP.

    parallel: the MLP gets what attention gets, before_attention(x), and what both give is added to x (Wang and
    Komatsuzaki 2021); before_mlp has no place then."""

    attention: AttentionShape | LatentAttentionShape
    mlp: PartShape
    before_attention: PartShape = Unchanged()
    behind_attention: PartShape = Unchanged()
    before_mlp: PartShape = Unchanged()
    behind_mlp: PartShape = Unchanged()
    parallel: bool = False


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint has its tensors; the layers' names end in their number."""

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    head: str = "lm_head"


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: embedding, layers, a norm, the LM head.

    built_by: as of ``PartShape``, called with (shape, comm, device, dtype); it returns a ``Model``.
    max_len: tokens of the longest sequence.  tied: the LM head is the embedding table.
    embedding_scale: multiplies the embedding; rounded_scale: after it has been rounded to the model's dtype.
    learned_positions: rows of a table of positions that is added to the embedding; 0 for none.
    logit_scale multiplies logits, and logit_cap caps them, as ``AttentionShape.soft_cap`` does scores.
    unread: patterns of the names of tensors that a checkpoint may have and that nothing here reads.
    pooled_head: what stands in the LM head's place; a family says it of labels by another name than transformers', of
    any other model the checkpoint's files do.  None for the LM head.
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
    pooled_head: PartShape | None = None

    @property
    def num_outputs(self) -> int:
        """How many logits a sampler sees: the vocabulary, or one that says nothing where nothing is generated."""
        return self.vocab_size if self.pooled_head is None else 1

    @property
    def unlike_rounded(self) -> str:
        """Why no checkpoint of rounded weights is read for it, see ``PartShape``; '' where one may be."""
        parts = (part for layer in self.layers for part in (layer.attention, layer.mlp))
        return next((part.unlike_rounded for part in parts if part.unlike_rounded), "")

    @property
    def num_layers(self) -> int:
        """Each has its keys and values."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads over all ranks, the same in every layer."""
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads over all ranks, the same in every layer: they share pages."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_size(self) -> int:
        """The same in every layer."""
        return self.layers[0].attention.head_size

    @property
    def intermediate_size(self) -> int:
        """Of the widest MLP."""
        return max(layer.mlp.width for layer in self.layers)

    @property
    def window(self) -> int:
        """Of the layers that have one, 0 if none has."""
        return max(layer.attention.window for layer in self.layers)

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Which layers see a window only."""
        return tuple(layer.attention.window > 0 for layer in self.layers)

    @property
    def first_window_layer(self) -> int:
        """The first of the layers that have the window, 0 if none has; see ``attention_needs`` for those behind it."""
        return self.windowed.index(True) if self.window else 0

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers behind ``first_window_layer`` that see everything."""
        first = self.first_window_layer
        return (
            tuple(index for index, one in enumerate(self.windowed) if index > first and not one) if self.window else ()
        )

    @property
    def attention_needs(self) -> tuple[str, ...]:
        """What an attention backend must be able to do beside the usual."""
        attentions = [layer.attention for layer in self.layers]
        needs = {
            SOFT_CAP: any(one.soft_cap for one in attentions),
            SINKS: any(one.sinks for one in attentions),
            LAYER_WINDOWS: bool(self.full_layers),
            LATENTS: any(one.latent_size for one in attentions),
        }
        return tuple(name for name, needed in needs.items() if needed)
