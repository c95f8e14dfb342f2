"""Rotary settings of a GGUF file, in the words of config.json.

Owns: their keys, and the tensors that are part of them.  Does not know: families, other tensors.
"""

import struct
from pathlib import Path
from typing import Any

from engine.checkpoints.gguf_families import YARN, GGUFFamily
from engine.checkpoints.gguf_header import GGUFHeader
from engine.types.errors import WeightsError

DIVISORS = "rope_freqs.weight"  # divisors of rotary frequencies: llama.cpp's form of the type llama3
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"


def rotary_settings(
    path: Path, prefix: str, header: GGUFHeader, family: GGUFFamily, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings.  prefix: of the keys.  config: the rest of config.json.  Raises WeightsError."""
    value = header.value
    theta = value(f"{prefix}.rope.freq_base")
    parameters: dict[str, Any] = {"rope_theta": 10000.0 if theta is None else theta, "rope_type": "default"}
    turned = value(f"{prefix}.rope.dimension_count")
    if family.partial and turned is not None:
        parameters["partial_rotary_factor"] = turned / _head_size(path, prefix, config)
    kind = value(f"{prefix}.rope.scaling.type") or "none"
    divisors, short, long = (vector(header, name) for name in (DIVISORS, SHORT, LONG))
    if divisors is not None:
        if kind != "none":
            raise WeightsError(f"{path}: {prefix}.rope.scaling.type is {kind!r}, expected none with {DIVISORS!r}")
        # The same divisors for short and long sequences, and no factor for scores.
        context = value(f"{prefix}.context_length")
        tables = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        return parameters | {"rope_type": "longrope", "original_max_position_embeddings": context, **tables}
    if short is not None and long is not None:
        parameters |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        parameters["attention_factor"] = value(f"{prefix}.rope.scaling.attn_factor")
        return parameters
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise WeightsError(f"{path}: {prefix}.rope.scaling.type is {kind!r}, expected one of none, linear, yarn")
    parameters |= {"rope_type": kind, "factor": value(f"{prefix}.rope.scaling.factor")}
    if kind == "linear":
        return parameters
    for factor in ("yarn_attn_factor", "yarn_ext_factor"):
        if (seen := value(f"{prefix}.rope.scaling.{factor}")) not in (None, 1.0):
            raise WeightsError(f"{path}: {prefix}.rope.scaling.{factor} is {seen}, expected 1 or none")
    parameters |= family.stretch
    parameters |= {name: seen for key, name in YARN.items() if (seen := value(f"{prefix}.{key}")) is not None}
    logarithmic = value(f"{prefix}.rope.scaling.yarn_log_multiplier")
    if family.log_scale and isinstance(logarithmic, int | float):
        parameters |= dict.fromkeys(("mscale", "mscale_all_dim"), logarithmic * family.log_scale)
    return parameters


def _head_size(path: Path, prefix: str, config: dict[str, Any]) -> int:
    try:
        size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    except (TypeError, ZeroDivisionError):
        what = "expected whole numbers above 0"
        raise WeightsError(f"{path}: {prefix}.embedding_length and {prefix}.attention.head_count: {what}") from None
    return size


def vector(header: GGUFHeader, name: str) -> list[float] | None:
    """Return the numbers of a tensor that is part of the configuration; None if there is none."""
    for tensor in header.tensors:
        if tensor.name == name:
            path = header.files[tensor.part]
            if tensor.kind != "F32":
                raise WeightsError(f"{path}: tensor {name!r} has type {tensor.kind}, expected F32")
            with path.open("rb") as file:
                file.seek(tensor.offset)
                return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
    return None
