"""Small checkpoints whose layers were rounded, in every format that is read, and the model that they stand for.

Owns: writing them, by packing code of its own.  The reference is transformers, with the numbers that were stored.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.checkpoints import build, save

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", ".w1", ".w2", ".w3")
LINEARS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
GROUP = 16
Stored = dict[str, Tensor]
# A weight [outputs, inputs] -> its tensors, by the last part of their names, and the weight that they stand for.
Store = Callable[[Tensor, torch.Generator], tuple[Stored, Tensor]]


def write(
    root: Path, store: Store, config: dict, variant: str = "llama", skip: str = ""
) -> tuple[Path, PreTrainedModel]:
    """Write a checkpoint whose linear layers went through ``store``, but those with ``skip`` in their names.

    Returns its directory and transformers' model with the weights that they stand for."""
    model = build(variant)
    directory = save(model, root)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    changed: Stored = {}
    floats = dict(tensors)
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind != "weight" or not prefix.endswith(LINEARS) or (skip and skip in prefix):
            changed[name] = tensor
            continue
        parts, weight = store(tensor.float(), generator)
        changed |= {f"{prefix}.{part}": one.contiguous() for part, one in parts.items()}
        floats[name] = weight
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"quantization_config": config}))
    plain = root / "floats"
    plain.mkdir()
    (plain / "config.json").write_text(text)
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    reference = type(model).from_pretrained(plain, attn_implementation="eager", dtype=torch.float32)
    return directory, reference.eval()


def pack(integers: Tensor, bits: int) -> Tensor:
    """Columns of unsigned integers into int32, the first in the lowest bits; the last one is filled with zeros."""
    stream = (integers.long()[:, :, None] >> torch.arange(bits) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32))
    words = (stream.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _by_groups(weight: Tensor, bits: int, groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(integers from 0, scales [O, G] in float16, zero points from 0, the weight that these stand for)."""
    most = (1 << bits) - 1
    number = int(groups.max()) + 1
    low, high = (torch.zeros(len(weight), number).scatter_reduce_(
        1, groups.expand(len(weight), -1), weight, how) for how in ("amin", "amax"))  # fmt: skip
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp_min(1e-4).half()
    middle = torch.full_like(low, (most + 1) / 2)
    zeros = middle if symmetric else (-low / scales.float()).round().clamp(1, most)
    integers = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return integers, scales, zeros, (integers - zeros[:, groups]) * scales.float()[:, groups]


def _groups(inputs: int, size: int = GROUP) -> Tensor:
    return torch.arange(inputs) // size


def awq(weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
    integers, scales, zeros, stands_for = _by_groups(weight, 4, _groups(weight.shape[1]), symmetric=False)

    def columns(one: Tensor) -> Tensor:
        ordered = one.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
        return pack(ordered, 4)

    return {"qweight": columns(integers.t()), "qzeros": columns(zeros.t()), "scales": scales.t()}, stands_for


def gptq(bits: int = 4, act_order: bool = False, offset: int = 1, size: int = GROUP, with_groups: bool = True) -> Store:
    def store(weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
        groups = _groups(weight.shape[1], size)
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        integers, scales, zeros, stands_for = _by_groups(weight, bits, groups, symmetric=False)
        parts = {
            "qweight": pack(integers, bits).t(),
            "qzeros": pack((zeros - offset).t(), bits),
            "scales": scales.t(),
        }
        return parts | ({"g_idx": groups.int()} if with_groups else {}), stands_for

    return store


def packed(bits: int = 4, symmetric: bool = True, act_order: bool = False) -> Store:
    def store(weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
        groups = _groups(weight.shape[1])
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        integers, scales, zeros, stands_for = _by_groups(weight, bits, groups, symmetric)
        parts = {
            "weight_packed": pack(integers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zeros.t(), bits).t()
        return parts | ({"weight_g_idx": groups.int()} if act_order else {}), stands_for

    return store


def int8(weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    integers = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": integers.to(torch.int8), "weight_scale": scales}, integers * scales.float()


def int8_with_zeros(weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scales = ((high - low) / 255).float()
    zeros = (-128 - low / scales).round().clamp(-128, 127)
    integers = (weight / scales + zeros).round().clamp(-128, 127)
    parts = {"weight": integers.to(torch.int8), "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return parts, (integers - zeros) * scales


def float8(block: tuple[int, int] = (0, 0), name: str = "weight_scale") -> Store:
    """Return a store of float8.  block: outputs and inputs that share a scale, 0 for all."""

    def store(weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
        height, width = (length or size for length, size in zip(block, weight.shape, strict=True))
        rows, columns = torch.arange(len(weight)) // height, torch.arange(weight.shape[1]) // width
        scales = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                part = weight[rows == row][:, columns == column]
                scales[row, column] = part.abs().max() / 448
        spread = scales[rows][:, columns]
        rounded = (weight / spread).to(torch.float8_e4m3fn)
        stored = scales.flatten() if block == (0, 0) else scales
        return {"weight": rounded, name: stored}, rounded.float() * spread

    return store


def compressed(form: str, **weights: object) -> dict:
    """A config of compressed-tensors with one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
# name -> (how a weight is stored, quantization_config)
FORMATS: dict[str, tuple[Store, dict]] = {
    "awq": (awq, AWQ),
    "awq-llm-awq": (awq, {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "zero_point": True}),
    "gptq": (gptq(), GPTQ),
    "gptq-act-order": (gptq(act_order=True), GPTQ | {"desc_act": True}),
    "gptq-without-g-idx": (gptq(with_groups=False), GPTQ),
    "gptq-v2": (gptq(offset=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-8-bits": (gptq(bits=8), GPTQ | {"bits": 8}),
    "gptq-2-bits": (gptq(bits=2), GPTQ | {"bits": 2}),
    "gptq-3-bits": (gptq(bits=3, size=32), GPTQ | {"bits": 3, "group_size": 32}),
    "gptq-3-bits-act-order": (gptq(bits=3, act_order=True), GPTQ | {"bits": 3, "desc_act": True}),
    "gptq-one-group": (gptq(size=1 << 20), GPTQ | {"group_size": -1}),
    "ct-int4": (packed(), compressed("pack-quantized", **INT4)),
    "ct-int4-zeros": (packed(symmetric=False), compressed("pack-quantized", **INT4 | {"symmetric": False})),
    "ct-int4-act-order": (packed(act_order=True), compressed("pack-quantized", **INT4 | {"actorder": "group"})),
    "ct-int8-groups": (packed(bits=8), compressed("pack-quantized", **INT4 | {"num_bits": 8})),
    "ct-int8": (int8, compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")),
    "ct-int8-zeros": (
        int8_with_zeros, compressed("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel")
    ),
    "ct-fp8-tensor": (float8(), compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "ct-fp8-channel": (float8((1, 0)), compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "ct-fp8-block": (
        float8((24, 40)),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 40]),
    ),
    "fp8-tensor": (float8(), FP8),
    "fp8-block": (float8((40, 24), "weight_scale_inv"), FP8 | {"weight_block_size": [40, 24]}),
}  # fmt: skip
