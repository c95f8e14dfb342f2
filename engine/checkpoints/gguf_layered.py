"""Settings of a GGUF file whose layers with a window and without it have other heads, in the words of config.json.

Owns: what Gemma 4's files say by layer and by kind of layer.  Does not know: other families, the form of tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoints.gguf_header import GGUFHeader
from engine.checkpoints.gguf_rotary import DIVISORS, vector
from engine.checkpoints.shards import StoredTensor
from engine.types.errors import WeightsError

NEVER = 1e20  # divisors above it stop a pair's rotation; the converter writes 1e30


def layered_settings(
    path: Path, prefix: str, header: GGUFHeader, config: dict[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Return the settings.  prefix: of the keys.  config: the rest of config.json.  tensors: by the model's names.

    Raises WeightsError."""
    number, pattern = config["num_hidden_layers"], header.value(f"{prefix}.attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != number:
        what = f"{pattern!r}, expected a list of {number}: whether each layer has a window"
        raise WeightsError(f"{path}: {prefix}.attention.sliding_window_pattern is {what}")
    heads, widths = config.get("num_key_value_heads"), config["intermediate_size"]
    counts = heads if isinstance(heads, list) else [heads] * number
    if len(counts) != number or (isinstance(widths, list) and len(widths) != number):
        what = f"expected a number, or {number} of them, one per layer"
        raise WeightsError(f"{path}: {prefix}.attention.head_count_kv or {prefix}.feed_forward_length: {what}")
    sizes = {True: config.get("head_dim"), False: config.get("global_head_dim")}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(number)]
    settings: dict[str, Any] = {
        "num_key_value_heads": counts[0],
        "per_layer_config": {
            str(layer): {"head_dim": sizes[bool(windowed)], "num_key_value_heads": counts[layer]}
            for layer, windowed in enumerate(pattern)
        },
        "attention_k_eq_v": any(
            f"{one}.k_proj.weight" in tensors and f"{one}.v_proj.weight" not in tensors for one in layers
        ),
        "enable_moe_block": bool(config.get("num_experts")),
        "rope_parameters": _rotary(path, prefix, header, sizes),
    }
    if table := tensors.get("model.embed_tokens_per_layer.weight"):
        settings["vocab_size_per_layer_input"] = table.shape[0]
    if isinstance(widths, list):
        settings |= {"intermediate_size": min(widths), "use_double_wide_mlp": min(widths) != max(widths)}
    return settings


def _rotary(path: Path, prefix: str, header: GGUFHeader, sizes: dict[bool, Any]) -> dict[str, Any]:
    """Return the rotary settings of both kinds of layers.  sizes: of the heads of layers with a window and without."""
    value = header.value
    if (kind := value(f"{prefix}.rope.scaling.type") or "none") != "none":
        raise WeightsError(f"{path}: {prefix}.rope.scaling.type is {kind!r}, expected none")
    turned = value(f"{prefix}.rope.dimension_count_swa")
    if turned not in (None, sizes[True]):
        what = f"expected {prefix}.attention.key_length_swa, {sizes[True]}"
        raise WeightsError(f"{path}: {prefix}.rope.dimension_count_swa is {turned}, {what}")
    divisors = vector(header, DIVISORS)
    count = divisors.count(1.0) if divisors else 0
    if not divisors or 2 * len(divisors) != sizes[False] or any(one < NEVER for one in divisors[count:]):
        what = f"for half of {prefix}.attention.key_length, {sizes[False]}, numbers that are 1, and then 1e30"
        raise WeightsError(f"{path}: tensor {DIVISORS!r}: expected {what}")
    windowed, whole = (value(f"{prefix}.rope.{key}") for key in ("freq_base_swa", "freq_base"))
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4 if windowed is None else windowed},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6 if whole is None else whole,
            "partial_rotary_factor": count / len(divisors),
        },
    }
