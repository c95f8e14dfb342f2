"""Fields of config.json that most families share: sizes, activations, rotary settings, the kinds of layers.

Owns: those fields and their checks.  Does not know: torch, families, how parts are composed.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import (
    AttentionShape,
    DecoderShape,
    GatedShape,
    LatentAttentionShape,
    LayerShape,
    Names,
    PartShape,
    RecurrentShape,
    RMSNormShape,
    RotaryShape,
)

# Far above any model, and small enough that the product of two or three of them fits a size in bytes.
MAX_LAYERS = 1 << 14
MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 28
MAX_EXPERTS = 1 << 12
MAX_TAPS = 1 << 6
MIN_WINDOW = 2  # with 1 a query would see only itself, and transformers' cache then keeps everything
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROTARY_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SLIDING, FULL = "sliding_attention", "full_attention"


class HeadSizes(TypedDict):
    """Sizes of attention, as keywords of ``AttentionShape``."""

    num_heads: int
    num_kv_heads: int
    head_size: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that every family has.  intermediate_size: of an MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_len: int

    @property
    def heads(self) -> HeadSizes:
        """Sizes of attention, as keywords of ``AttentionShape``."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_size": self.head_size}


def read_sizes(fields: Fields, *, head_size: int = 0, num_kv_heads: int = 0) -> Sizes:
    """Read the sizes.  Raises WeightsError naming the field.

    head_size, num_kv_heads: the family's values if config.json has none; 0 for hidden_size / heads, and heads."""
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
    for name, only in (("is_causal", True), ("use_bidirectional_attention", False)):
        fields.demand(name, only, "text is generated from left to right")
    return Sizes(
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_size=size,
        max_len=fields.integer("max_position_embeddings"),
    )


def read_activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> str:
    """Return the activation of the MLPs."""
    return fields.choice(name, default, ACTIVATIONS)


def read_gated(fields: Fields, sizes: Sizes, *, bias: bool = False, merged: str = "", name: str = "mlp") -> GatedShape:
    """Return the gated MLP of most families."""
    return GatedShape(
        intermediate_size=sizes.intermediate_size,
        activation=read_activation(fields),
        bias=bias,
        merged=merged,
        name=name,
    )


def read_norm(fields: Fields, name: str, *, offset: float = 0.0, default_eps: float = 1e-6) -> RMSNormShape:
    """Return an RMS norm by its name in the checkpoint.  default_eps: for families of other packages."""
    return RMSNormShape(name=name, eps=fields.number("rms_norm_eps", default_eps), offset=offset)


def pre_norm(
    fields: Fields,
    attention: AttentionShape | LatentAttentionShape | None,
    mlp: PartShape,
    recurrent: RecurrentShape | None = None,
) -> LayerShape:
    """Return a layer like Llama's: an RMS norm before attention and one before the MLP, with the usual names."""
    return LayerShape(
        attention=attention,
        recurrent=recurrent,
        mlp=mlp,
        before_attention=read_norm(fields, "input_layernorm"),
        before_mlp=read_norm(fields, "post_attention_layernorm"),
    )


# Fields that name the layers with attention, in one family or another.
KINDS_OF_LAYERS = (
    "layer_types", "layers_block_type", "hybrid_override_pattern", "attn_layer_indices", "full_attn_idxs",
    "full_attention_interval",
)  # fmt: skip


def decoder(
    fields: Fields,
    sizes: Sizes,
    layers: Sequence[LayerShape],
    *,
    tied: bool = False,
    norm: str = "model.norm",
    offset: float = 0.0,
    unread: tuple[str, ...] = (),
    names: Names | None = None,
) -> DecoderShape:
    """Return the decoder around the layers, as in most families.

    tied: value if config.json has none.  norm, offset: name and offset of the last norm.

    Raises WeightsError if no layer has attention."""
    if all(layer.attention is None for layer in layers):
        kinds = next((name for name in KINDS_OF_LAYERS if fields.has(name)), KINDS_OF_LAYERS[0])
        raise fields.error(kinds, fields.table.get(kinds), "attention in at least one layer")
    return DecoderShape(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_len=sizes.max_len,
        layers=tuple(layers),
        norm=read_norm(fields, norm, offset=offset),
        unread=unread,
        names=names or Names(),
        tied=fields.flag("tie_word_embeddings", tied),
    )


def alike(fields: Fields, sizes: Sizes, layer: LayerShape) -> list[LayerShape]:
    """Return the layers of a family with one kind of layers and no window; ``layer_types`` must agree."""
    _check_layer_types(fields, [False] * sizes.num_layers)
    return [layer] * sizes.num_layers


def windowed_layers(
    fields: Fields, sizes: Sizes, attention: AttentionShape, window: int, windowed: Sequence[bool]
) -> list[AttentionShape]:
    """Return the attention of each layer.  windowed: which layers have the window, by the family's rule.

    ``layer_types`` must agree.  A window that covers the longest sequence counts as none.
    """
    _check_layer_types(fields, windowed if window else [False] * sizes.num_layers)
    if window >= sizes.max_len or not window:
        return [attention] * sizes.num_layers
    sliding = msgspec.structs.replace(attention, window=window)
    return [sliding if one else attention for one in windowed]


def upper_window(fields: Fields, sizes: Sizes, attention: AttentionShape) -> list[AttentionShape]:
    """Return the attention of each layer of a Qwen: layers from max_window_layers on have the window, if it is used."""
    window, first = used_window(fields), fields.integer("max_window_layers", 28, minimum=0)
    return windowed_layers(fields, sizes, attention, window, [layer >= first for layer in range(sizes.num_layers)])


def used_window(fields: Fields) -> int:
    """Return the window of a Qwen; 0 if it is unused or null.  A missing one is the families' default of 4096."""
    if not fields.flag("use_sliding_window", False) or fields.is_null("sliding_window"):
        return 0
    return fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)


def read_layer_types(fields: Fields, sizes: Sizes, default: Sequence[bool]) -> list[bool]:
    """Return which layers have a window, by ``layer_types``.  default: the family's rule if config.json has none."""
    kinds = fields.table.get("layer_types")
    if kinds is None:
        return list(default)
    if (
        not isinstance(kinds, list)
        or len(kinds) != sizes.num_layers
        or not all(one in (SLIDING, FULL) for one in kinds)
    ):
        raise fields.error("layer_types", kinds, f"a list of {sizes.num_layers} kinds, each {SLIDING} or {FULL}")
    return [one == SLIDING for one in kinds]


def _check_layer_types(fields: Fields, windowed: Sequence[bool]) -> None:
    """Refuse a ``layer_types``, as transformers 5 writes it, that contradicts the window."""
    kinds = fields.table.get("layer_types")
    expected = [SLIDING if one else FULL for one in windowed]
    if kinds is None or kinds == expected:
        return
    words = f"a list of {len(expected)} kinds"
    if isinstance(kinds, list) and len(kinds) == len(expected):
        index = next(index for index, kind in enumerate(expected) if kinds[index] != kind)
        words = f"{expected[index]} as kind {index}"
    advice = "leave layer_types out, or make it agree with them"
    raise fields.error("layer_types", kinds, f"{words}, as the settings of the window give; {advice}")


def read_kinds(fields: Fields, num_layers: int, allowed: Sequence[str], name: str = "layer_types") -> list[str]:
    """Return the kind of each layer, for a family whose layers differ in more than a window."""
    kinds = fields.table.get(name)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(one not in allowed for one in kinds):
        raise fields.error(name, kinds, f"a list of {num_layers} kinds, each {' or '.join(allowed)}")
    return kinds


def read_rotary(fields: Fields, sizes: Sizes, *, theta: float = 10000.0, partial: float | None = None) -> RotaryShape:
    """Return rotary settings from ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``.

    If both are there, a ``rope_scaling`` that is not empty replaces ``rope_parameters``, as in transformers 5.
    theta: base if config.json has none.  partial: rotated part of a head if config.json has none; None for a family
    that rotates all of it.
    """
    name = "rope_scaling" if fields.table.get("rope_scaling") else "rope_parameters"
    scaling = fields.section(name)
    read_theta = scaling.number("rope_theta", fields.number("rope_theta", theta))
    replaced = fields.section("rope_parameters").number("rope_theta", read_theta)
    if replaced != read_theta and not scaling.has("rope_theta"):
        # transformers 5 would use the default base, which cannot be what a file that only adds a stretch means.
        expected = f"it to repeat rope_theta {replaced} of rope_parameters, which it replaces"
        raise fields.error("rope_scaling", scaling.table, expected)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROTARY_TYPES or any(isinstance(value, dict) for value in scaling.table.values()):
        seen = kind if kind not in ROTARY_TYPES else scaling.table
        raise fields.error(name, seen, f"one set of rotary settings of type {', '.join(ROTARY_TYPES)}")
    size = _rotated(fields, scaling, sizes.head_size, partial)
    return msgspec.structs.replace(read_stretch(fields, scaling, sizes, read_theta, size), size=size)


def read_stretch(fields: Fields, scaling: Fields, sizes: Sizes, theta: float, size: int = 0) -> RotaryShape:
    """Return one set of rotary settings: how it stretches the frequencies of base ``theta``."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    max_len = sizes.max_len
    if kind == "default":
        return RotaryShape(theta=theta)
    original = scaling.integer("original_max_position_embeddings", max_len)
    original = fields.integer("original_max_position_embeddings", original)
    if kind == "linear":
        return RotaryShape(kind=kind, theta=theta, factor=scaling.number("factor"))
    if kind == "dynamic":
        # It only stretches when a sequence is longer than in training, which never happens here.
        scaling.number("factor")
        return RotaryShape(theta=theta)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high < low:
            raise scaling.error("high_freq_factor", high, f"at least low_freq_factor={low}")
        return RotaryShape(
            kind=kind,
            theta=theta,
            factor=scaling.number("factor"),
            original_max_len=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "longrope":
        return _read_longrope(scaling, theta, original, max_len, (size or sizes.head_size) // 2)
    return _read_yarn(scaling, theta, original, max_len)


def _rotated(fields: Fields, scaling: Fields, head_size: int, partial: float | None) -> int:
    """Return the number of a head's elements that rotate; 0 for all."""
    share = 1.0 if partial is None else partial
    for where in (fields, scaling):
        share = where.number("partial_rotary_factor", share)
        if share > 1 or (partial is None and share != 1.0):
            raise where.error("partial_rotary_factor", share, "1: this family rotates all of each head")
    size = int(head_size * share)
    if size % 2 or not size:
        expected = f"a share of head_dim={head_size} that is an even number"
        raise fields.error("partial_rotary_factor", share, expected)
    return size if size != head_size else 0


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """Return the factor that sharpens scores in a context ``factor`` times as long.  weight: mscale of config.json."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_yarn(scaling: Fields, theta: float, original: int, max_len: int) -> RotaryShape:
    factor = scaling.number("factor", max_len / original)
    # The temperature of Peng et al. 2023 (YaRN, eq. 22), applied to cos and sin; DeepSeek divides two of them.
    temperature = yarn_temperature(factor)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        temperature = yarn_temperature(factor, scaling.number("mscale"))
        temperature /= yarn_temperature(factor, scaling.number("mscale_all_dim"))
    return RotaryShape(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_len=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number("attention_factor", temperature),
        truncate=scaling.flag("truncate", "truncate" not in scaling.table),  # the one null that is not "missing"
    )


def _read_longrope(scaling: Fields, theta: float, original: int, max_len: int, pairs: int) -> RotaryShape:
    """Return both sets of factors (Ding et al. 2024); a GGUF file may have only one."""
    tables = {}
    for name in ("short_factor", "long_factor"):
        factors = scaling.table.get(name)
        if not isinstance(factors, list) or len(factors) != pairs:
            raise scaling.error(name, factors, f"a list of {pairs} numbers, one for each rotated pair")
        tables[name] = tuple(Fields({name: one}, scaling.origin).number(name) for one in factors)
    stretch = scaling.number("factor", max_len / original)
    long, short = tables["long_factor"], tables["short_factor"]
    return RotaryShape(
        kind="longrope",
        theta=theta,
        original_max_len=original,
        factors=long if max_len > original else short,
        short_factors=short if long != short and max_len > original else (),
        attention_factor=scaling.number(
            "attention_factor", math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        ),
    )
