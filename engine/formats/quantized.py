"""Weights that a checkpoint stores rounded: AWQ, GPTQ, compressed-tensors, and float8 with scales.

Owns: the tensors that make up a weight in each format, and the check that they fit each other.
Does not know: which layers a model has.  Tensors that are not rounded are read as they are, without a list of them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoints.quantization import Quantization
from engine.checkpoints.shards import StoredTensor
from engine.formats import integers
from engine.formats.reader import SafetensorsReader
from engine.kernels.float8_blocks import in_blocks
from engine.layers.float8_experts import BLOCK, scales_of
from engine.layers.packing import StoredRows
from engine.types.errors import WeightsError

# Tensors for rounded inputs and a rounded KV cache; here neither is rounded.
UNUSED = ("input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale", "weight_shape")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("BF16", "F16", "F32")
OF_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to store a weight.  main: the tensor with its elements.  needed, optional: the tensors that belong to it.
    shape: computes (outputs, inputs) from the main tensor's shape."""

    main: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]


class QuantizedReader:
    """Tensors of a quantized checkpoint; a rounded weight is read as its float32 values.

    A rounded weight is read whole even for a part of it, since its elements are not in the order of its rows.
    keeps_experts: whether experts' elements and scales are tensors of their own, for a kernel that reads them.
    rounds_experts: whether experts in floats are read so as well, rounded with a scale per block of 128 x 128.
    Raises WeightsError if tensors of a weight are missing or do not fit each other.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        quantization: Quantization,
        keeps_experts: bool = False,
        rounds_experts: bool = False,
    ) -> None:
        self._plain = SafetensorsReader(stored)
        self._keeps_experts = keeps_experts
        self._quantization = quantization
        self._parts: dict[str, dict[str, str]] = {}  # for each rounded weight: kind -> name of the stored tensor
        self.tensors = self._gather(stored)
        self._floats: dict[str, str] = {}  # elements and scales that are made of a weight in floats -> that weight
        self._last: tuple[str, dict[str, Tensor]] = ("", {})  # such a weight: its two tensors
        if rounds_experts:
            self.tensors |= self._in_floats()

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """Return a part of a tensor.  Stacks are never rounded: no format has them."""
        if name in self._floats:
            return self._rounded(self._floats[name])[name].narrow(dim, start, length)
        if name not in self._parts:
            return self._plain.part(name, dim, start, length, member)
        return self._weight(name).narrow(dim, start, length)

    def rows(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> StoredRows | None:
        """Return rows of blocks of a weight with integers of 4 bits and a scale per 32, 64 or 128 inputs in order."""
        if not self._quantization.is_int4 or name not in self._parts:
            return None
        parts = {kind: self._plain.whole(stored) for kind, stored in self._parts[name].items()}
        scales = parts["weight_scale"] if "weight_scale" in parts else parts["scales"]
        try:
            blocks = _in_form(integers.stored, parts, self._quantization)
        except (RuntimeError, IndexError, ValueError):
            return None  # ``part`` names what does not fit
        inputs, width = self.tensors[name].shape[1], self._quantization.block[1]
        if dim == 0:
            blocks = blocks[start : start + length]
        elif start % width or length % width:
            return None
        else:
            groups_OGB = blocks.view(len(blocks), inputs // width, -1)
            blocks = groups_OGB[:, start // width : (start + length) // width].flatten(1)
            inputs = length
        kind = f"{'UPPER' if scales.dtype == torch.bfloat16 else 'HALF'}{width}"
        return StoredRows(self._where(name), kind, blocks, inputs)

    def close(self) -> None:
        self._plain.close()

    def _gather(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        layouts = _layouts(self._quantization)
        seen: dict[str, StoredTensor] = {}
        taken: set[str] = set()
        for name, tensor in stored.items():
            prefix, _, kind = name.rpartition(".")
            layout = next((one for one in layouts if one.main == kind and _fits(one, prefix, tensor, stored)), None)
            if layout is None or (self._keeps_experts and OF_EXPERT.search(name)):
                continue
            names = {one: f"{prefix}.{one}" for one in (layout.main, *layout.needed, *layout.optional)}
            parts = {one: full for one, full in names.items() if full in stored}
            if missing := [names[one] for one in layout.needed if one not in parts]:
                raise WeightsError(f"{tensor.file}: tensor {name!r} needs the tensor {missing[0]!r}, which is missing")
            weight = f"{prefix}.weight"
            shape = layout.shape(tensor.shape)
            num_bytes = sum(stored[one].num_bytes for one in parts.values())
            seen[weight] = StoredTensor(tensor.file, weight, "F32", shape, num_bytes)
            self._parts[weight] = parts
            taken.update(parts.values())
        unused = tuple(f".{one}" for one in UNUSED)
        left = {name: one for name, one in stored.items() if name not in taken and not name.endswith(unused)}
        for name, one in left.items():
            if one.dtype in FLOAT8 and not (self._keeps_experts and OF_EXPERT.search(name)):
                raise WeightsError(f"{one.file}: tensor {name!r} has dtype {one.dtype}, but its scale is missing")
        return left | seen

    def _in_floats(self) -> dict[str, StoredTensor]:
        """Return the elements and scales of experts' weights in floats."""
        found: dict[str, StoredTensor] = {}
        for name, one in self.tensors.items():
            if (
                one.dtype not in FLOATS
                or len(one.shape) != 2
                or not (OF_EXPERT.search(name) and name.endswith(".weight"))
            ):
                continue
            scales, blocks = scales_of(name), tuple(-(-size // BLOCK) for size in one.shape)
            if scales in self.tensors:
                raise WeightsError(f"{one.file}: tensor {name!r} has dtype {one.dtype}, but there is a scale for it")
            found[name] = StoredTensor(one.file, name, "F8_E4M3", one.shape, one.num_bytes)
            found[scales] = StoredTensor(one.file, scales, "F32", blocks, 0)
            self._floats |= {name: name, scales: name}
        return found

    def _rounded(self, name: str) -> dict[str, Tensor]:
        """Return the elements and scales of a weight in floats.  Both are read one after the other."""
        if self._last[0] != name:
            elements_OI, scales_BC = in_blocks(self._plain.whole(name))
            self._last = name, {name: elements_OI.float(), scales_of(name): scales_BC}
        return self._last[1]

    def _weight(self, name: str) -> Tensor:
        parts = {kind: self._plain.whole(stored) for kind, stored in self._parts[name].items()}
        method = self._quantization
        try:
            weight = _in_form(integers.scaled, parts, method)
        except (RuntimeError, IndexError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            shapes = ", ".join(f"{kind} {list(one.shape)}" for kind, one in parts.items())
            raise WeightsError(f"{self._where(name)}: its tensors do not fit each other: {shapes} ({reason})") from None
        if tuple(weight.shape) != self.tensors[name].shape:
            expected = list(self.tensors[name].shape)
            raise WeightsError(f"{self._where(name)}: its tensors give shape {list(weight.shape)}, expected {expected}")
        return weight

    def _where(self, name: str) -> str:
        return f"{self.tensors[name].file}: tensor {name!r} in {self._quantization}"


def _in_form(form: integers.Form, parts: Mapping[str, Tensor], method: Quantization) -> Tensor:
    """Return the weight.  Raises torch's errors, or ValueError, if tensors do not fit each other, or the form."""
    if method.method == "awq":
        return integers.awq(form, parts["qweight"], parts["qzeros"], parts["scales"], method.block)
    if method.method == "gptq":
        tensors = (parts["qweight"], parts["qzeros"], parts["scales"], parts.get("g_idx"))
        return integers.gptq(form, *tensors, method.block, method.bits, method.zero_offset)
    zeros = parts.get("weight_zero_point")
    if "weight_packed" in parts:
        elements, scales = parts["weight_packed"], parts["weight_scale"]
        return integers.packed(form, elements, scales, zeros, parts.get("weight_g_idx"), method.block, method.bits)
    scales = parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]
    return form(parts["weight"], scales, zeros, method.block, None)


def _layouts(quantization: Quantization) -> list[Layout]:
    def unpacked(size: int) -> int:
        return size * integers.INT32_BITS // quantization.bits

    match quantization.method:
        case "awq":
            return [Layout("qweight", ("qzeros", "scales"), (), lambda s: (unpacked(s[1]), s[0]))]
        case "gptq":
            return [Layout("qweight", ("qzeros", "scales"), ("g_idx",), lambda s: (s[1], unpacked(s[0])))]
        case "fp8":
            return [
                Layout("weight", ("weight_scale_inv",), (), lambda s: s),
                Layout("weight", ("weight_scale",), (), lambda s: s),
            ]
        case _:
            packed = Layout(
                "weight_packed", ("weight_scale",), ("weight_zero_point", "weight_g_idx"),
                lambda s: (s[0], unpacked(s[1])),
            )  # fmt: skip
            return [packed, Layout("weight", ("weight_scale",), ("weight_zero_point",), lambda s: s)]


def _fits(layout: Layout, prefix: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor is the main one of this layout, and not a tensor of floats with the same name."""
    if len(tensor.shape) != 2:
        return False
    if layout.main != "weight":
        return tensor.dtype == "I32"
    return tensor.dtype in (*FLOAT8, "I8") and any(f"{prefix}.{one}" in stored for one in layout.needed)
