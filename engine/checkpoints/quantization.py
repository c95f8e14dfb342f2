"""The rounding of a checkpoint's weights, as ``quantization_config`` in config.json describes it.

Owns: reading it, and refusing formats that cannot be read.  Does not know: torch, tensors.
The names of tensors show which layers are not rounded, so lists of those layers are not read.
"""

from typing import Any, Final, Literal

import msgspec

from engine.checkpoints.fields import Fields

MXFP4: Final = "mxfp4"
MXFP4_GROUP: Final = 32  # inputs that share a scale
Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "mxfp4"]
INTEGER_BITS = {"awq": (4,), "gptq": (2, 3, 4, 8)}
PACKED_BITS = (2, 4, 8)  # of compressed-tensors
FLOAT_BITS = 8
INT4_GROUPS = (32, 64, 128)
MAX_SIZE = 1 << 20  # of a group or block


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The format of rounded weights.

    bits: of an element.  kind: int or float.  block: (outputs, inputs) that share a scale, 0 for all of them.
    zero_offset: what GPTQ's first format subtracts from its zero points."""

    method: Method
    bits: int
    kind: Literal["int", "float"]
    block: tuple[int, int]
    zero_offset: int = 0

    @property
    def is_int4(self) -> bool:
        """Whether the elements are integers of 4 bits, of which 32, 64 or 128 inputs of an output share a scale."""
        outputs, inputs = self.block
        return self.kind == "int" and self.bits == 4 and outputs == 1 and inputs in INT4_GROUPS

    def __str__(self) -> str:
        return f"{self.method} ({self.kind}{self.bits})"

    @property
    def is_float8(self) -> bool:
        """Whether elements are floats that some devices multiply as they are."""
        return self.kind == "float" and self.bits == FLOAT_BITS

    @property
    def scales(self) -> str:
        """Text for people: what shares a scale."""
        outputs, inputs = self.block
        if not inputs:
            return "a scale per output" if outputs else "a scale per tensor"
        return f"a scale per {inputs} inputs" if outputs == 1 else f"a scale per block of {outputs} x {inputs}"


def read_quantization(fields: Fields) -> Quantization | None:
    """Read it from config.json's fields; None if weights are not rounded.  Raises WeightsError naming the fault."""
    if not fields.has("quantization_config"):
        return None
    config = fields.section("quantization_config")
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "mxfp4": _mxfp4}
    return readers[config.choice("quant_method", "", sorted(readers))](config)


def _awq(config: Fields) -> Quantization:
    if (version := config.text("version", "gemm").lower()) != "gemm":
        raise config.error("version", version, "gemm: other layouts of AWQ are not read")
    bits, size = ("bits", "group_size") if config.has("bits") else ("w_bit", "q_group_size")
    return Quantization(
        method="awq", kind="int", bits=_bits(config, bits, INTEGER_BITS["awq"]), block=_group(config, size)
    )


def _gptq(config: Fields) -> Quantization:
    formats = {"gptq": 1, "gptq_v2": 0}
    version = config.choice("checkpoint_format", "gptq", formats)
    return Quantization(
        method="gptq",
        kind="int",
        bits=_bits(config, "bits", INTEGER_BITS["gptq"]),
        block=_group(config, "group_size"),
        zero_offset=formats[version],
    )


def _fp8(config: Fields) -> Quantization:
    if (form := config.text("fmt", "e4m3")) != "e4m3":
        raise config.error("fmt", form, "e4m3")
    return Quantization(method="fp8", kind="float", bits=FLOAT_BITS, block=_block(config, "weight_block_size"))


def _mxfp4(config: Fields) -> Quantization:
    """Read the format of gpt-oss, which has no settings."""
    return Quantization(method=MXFP4, kind="float", bits=4, block=(1, MXFP4_GROUP))


def _compressed_tensors(config: Fields) -> Quantization:
    config.choice("format", "", ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"))
    if (sparsity := config.section("sparsity_config").text("format", "dense")) != "dense":
        raise config.error("sparsity_config", sparsity, "none: sparse weights are not read")
    groups = config.section("config_groups")
    seen = [_weights(groups.section(name)) for name in groups.table]
    if not seen or any(one != seen[0] for one in seen):
        raise config.error("config_groups", groups.table, "groups that all round weights in the same way")
    return seen[0]


def _weights(group: Fields) -> Quantization:
    """Read one of compressed-tensors' groups of layers.  Settings for inputs are ignored: inputs are not rounded."""
    weights = group.section("weights")
    kind = weights.text("type", "int")
    if kind not in ("int", "float"):
        raise weights.error("type", kind, "int or float")
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    blocks: dict[str, Any] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "group": lambda: _group(weights, "group_size"),
        "block": lambda: _block(weights, "block_structure"),
    }
    if strategy not in blocks:
        raise weights.error("strategy", strategy, f"one of {', '.join(blocks)}")
    bits = _bits(weights, "num_bits", (FLOAT_BITS,) if kind == "float" else PACKED_BITS)
    return Quantization(
        method="compressed-tensors", kind="float" if kind == "float" else "int", bits=bits, block=blocks[strategy]()
    )


def _bits(fields: Fields, name: str, allowed: tuple[int, ...]) -> int:
    if (bits := fields.integer(name)) not in allowed:
        raise fields.error(name, bits, f"one of {', '.join(map(str, allowed))}")
    return bits


def _group(fields: Fields, name: str) -> tuple[int, int]:
    """Return a block of some inputs of one output; -1 in the file means all of them."""
    size = fields.integer(name, minimum=-1, maximum=MAX_SIZE)
    if size == 0:
        raise fields.error(name, size, "a number of inputs, or -1 for all")
    return 1, max(size, 0)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    if not fields.has(name):
        return 0, 0
    block = fields.table[name]
    if not isinstance(block, list) or len(block) != 2 or any(type(one) is not int or one < 1 for one in block):
        raise fields.error(name, block, "two sizes, of outputs and inputs")
    return block[0], block[1]
