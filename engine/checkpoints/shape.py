"""The shape of a dense decoder: every number that differs between the model families.

Owns: the record that a family fills in and the decoder is built from, and the fields all families share.
Does not know: torch, weights, ranks.
"""

import math

import msgspec

from engine.checkpoints.fields import Fields

# Far beyond any model, and small enough that no product of two or three of them overflows a size in bytes.
MAX_LAYERS = 1 << 14
MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 28
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryShape(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base frequencies and how they are stretched to longer contexts.

    factor: by how much the context was extended.  original_max_len: what it was extended from.
    low_freq_factor, high_freq_factor: llama3.  beta_fast, beta_slow, attention_factor, truncate: yarn;
    attention_factor multiplies cos and sin.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class DecoderShape(msgspec.Struct, frozen=True, kw_only=True):
    """A pre-norm decoder with grouped-query attention and a gated MLP.

    activation: silu; gelu (Hendrycks and Gimpel 2016) by the error function; gelu_pytorch_tanh, its approximation.
    tied: the LM head is the embedding table.  qk_norm: RMSNorm over each query and key head before rotation.
    window: how many tokens back a query sees, itself included, 0 for all; only layers from first_window_layer on.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_len: int
    norm_eps: float
    rotary: RotaryShape
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    first_window_layer: int = 0


def read_dense(
    fields: Fields,
    *,
    head_size: int = 0,
    num_kv_heads: int = 0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int = 0,
    first_window_layer: int = 0,
) -> DecoderShape:
    """The shape by the fields that every dense family spells alike; the keywords are what a family says differently.

    head_size, num_kv_heads: what the family takes when config.json does not say; 0 for hidden_size / heads and heads.
    """
    if (activation := fields.text("hidden_act", "silu")) not in ACTIVATIONS:
        raise fields.error("hidden_act", activation, f"one of {', '.join(ACTIVATIONS)}")
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={num_heads}")
    hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    if not head_size and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", hidden_size, f"a multiple of num_attention_heads={num_heads}")
    size = fields.integer("head_dim", head_size or hidden_size // num_heads, maximum=MAX_HEADS)
    if size % 2:
        raise fields.error("head_dim", size, "an even number, so that rotary embeddings can pair it")
    if not fields.flag("is_causal", True):
        raise fields.error("is_causal", False, "true: text is generated from left to right")
    max_len = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    _check_layer_types(fields, window, first_window_layer, num_layers)
    # A window that no query can reach past, or that starts behind the last layer, is no window.
    if window >= max_len or first_window_layer >= num_layers:
        window, first_window_layer = 0, 0
    return DecoderShape(
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_size=size,
        max_len=max_len,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=read_rotary(fields, max_len),
        activation=activation,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        window=window,
        first_window_layer=first_window_layer,
    )


def read_rotary(fields: Fields, max_len: int) -> RotaryShape:
    """Rotary settings, from ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``.

    Where both are, the older one that says anything stands for all of the newer one, as in transformers 5.
    """
    name = "rope_scaling" if fields.table.get("rope_scaling") else "rope_parameters"
    scaling = fields.section(name)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROTARY_TYPES or any(isinstance(value, dict) for value in scaling.table.values()):
        seen = kind if kind not in ROTARY_TYPES else scaling.table
        raise fields.error(name, seen, f"one set of rotary settings of type {', '.join(ROTARY_TYPES)}")
    for where in (fields, scaling):
        if (share := where.number("partial_rotary_factor", 1.0)) != 1.0:
            raise where.error("partial_rotary_factor", share, "1: rotating a part of each head is not implemented")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    replaced = fields.section("rope_parameters").number("rope_theta", theta)
    if replaced != theta and not scaling.has("rope_theta"):
        # transformers 5 would go on with the default base, which a file that only adds a stretch cannot mean.
        expected = f"it to repeat rope_theta {replaced} of rope_parameters, which it replaces"
        raise fields.error("rope_scaling", scaling.table, expected)
    if kind == "default":
        return RotaryShape(theta=theta)
    original = scaling.integer("original_max_position_embeddings", max_len)
    original = fields.integer("original_max_position_embeddings", original)
    if kind == "linear":
        return RotaryShape(kind=kind, theta=theta, factor=scaling.number("factor"))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", high, f"a number above low_freq_factor={low}")
        return RotaryShape(
            kind=kind,
            theta=theta,
            factor=scaling.number("factor"),
            original_max_len=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _read_yarn(scaling, theta, original, max_len)


def _read_yarn(scaling: Fields, theta: float, original: int, max_len: int) -> RotaryShape:
    factor = scaling.number("factor", max_len / original)
    if scaling.has("mscale") or scaling.has("mscale_all_dim"):
        raise scaling.error("mscale", scaling.table.get("mscale"), "no mscale: use attention_factor")
    return RotaryShape(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_len=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        # The temperature that Peng et al. 2023 (YaRN, eq. 22) fit, applied to cos and sin.
        attention_factor=scaling.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        truncate=scaling.flag("truncate", "truncate" not in scaling.table),  # the one null that is not "missing"
    )


def _check_layer_types(fields: Fields, window: int, first_window_layer: int, num_layers: int) -> None:
    """Refuse a list of the layers' kinds, as transformers 5 writes it, that contradicts the window."""
    kinds = fields.table.get("layer_types")
    if kinds is None:
        return
    first = first_window_layer if window else num_layers
    expected = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if kinds != expected:
        raise fields.error("layer_types", kinds, "the layers that the sliding window settings give")
