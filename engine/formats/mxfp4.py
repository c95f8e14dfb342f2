"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores them: 4-bit floats that share a scale by 32.

Legend: E experts · O outputs · I inputs · G groups of 32 inputs with a scale of their own
Owns: the two tensors of a stack, NAME_blocks [E, O, G, 16] and NAME_scales [E, O, G], read as floats, as ggml's blocks
or as they are.
Does not know: which layers a model has.  Other tensors are read as they are.
"""

from collections.abc import Mapping

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.checkpoints.quantization import MXFP4_GROUP
from engine.checkpoints.shards import StoredTensor
from engine.formats.reader import SafetensorsReader
from engine.layers.packing import StoredRows
from engine.types.errors import WeightsError

BLOCKS, SCALES = "_blocks", "_scales"
GROUP, GROUP_BYTES = MXFP4_GROUP, MXFP4_GROUP // 2
BIAS, NO_SCALE = 127, 255  # of a scale's exponent; the code that stands for NaN
LARGEST_SCALE = 128  # for the kernel: weights up to 12
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # floats of 1 bit sign, 2 bits exponent, 1 bit mantissa
VALUES = (*POSITIVE, *(-one for one in POSITIVE))


class MXFP4Reader:
    """Tensors of a checkpoint with stacks in MXFP4; every stack is seen as [E, O, I], and an expert is read alone.

    Raises WeightsError if the tensors of a stack are missing or do not fit each other."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._plain = SafetensorsReader(stored)
        stacks = {
            name.removesuffix(BLOCKS): tensor
            for name, tensor in stored.items()
            if name.endswith(BLOCKS) and tensor.dtype == "U8"
        }
        parts = {f"{name}{kind}" for name in stacks for kind in (BLOCKS, SCALES)}
        self._stacks = {name: _stack(name, blocks, stored) for name, blocks in stacks.items()}
        self.tensors = {name: _upright(one) for name, one in stored.items() if name not in parts} | self._stacks

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """Return a part of a tensor; of a stack, a part of one expert's matrix [O, I]."""
        if name in self._stacks:
            weight_OI = decoded(*self._codes(name, dim, start, length, member))
            return weight_OI.narrow(1, start, length) if dim else weight_OI
        if member is None or len(self.tensors[name].shape) == len("EO"):
            return self._plain.part(name, dim, start, length, member)
        return self._plain.part(name, 1 - dim, start, length, member).t()

    def rows(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> StoredRows | None:
        """Return a part of an expert's matrix in ggml's blocks of the same numbers."""
        if name not in self._stacks or (dim and (start % GROUP or length % GROUP)):
            return None
        blocks_OGB, scales_OG = self._codes(name, dim, start, length, member)
        if dim:
            groups = slice(start // GROUP, (start + length) // GROUP)
            blocks_OGB, scales_OG = blocks_OGB[:, groups], scales_OG[:, groups]
        low_OGB, high_OGB = codes(blocks_OGB).unflatten(-1, (2, -1)).unbind(-2)
        whole_OGB = torch.cat([scales_OG[..., None], low_OGB | high_OGB << 4], -1)
        where = f"{self._stacks[name].file}: tensor {name!r}"
        return StoredRows(where, "MXFP4", whole_OGB.flatten(1), scales_OG.shape[1] * GROUP)

    def _codes(self, name: str, dim: int, start: int, length: int, member: int | None) -> tuple[Tensor, Tensor]:
        """Return blocks and scales of some outputs of an expert, or of all for a part of the inputs."""
        outputs = (0, self._stacks[name].shape[1]) if dim else (start, length)
        blocks_OGB, scales_OG = (self._plain.part(f"{name}{kind}", 0, *outputs, member) for kind in (BLOCKS, SCALES))
        if (scales_OG == NO_SCALE).any():
            raise WeightsError(f"{self._stacks[name].file}: tensor '{name}{SCALES}' contains NaN; the file is damaged")
        return blocks_OGB, scales_OG

    def close(self) -> None:
        self._plain.close()


class CodesReader(SafetensorsReader):
    """Tensors of a checkpoint with stacks in MXFP4 as they are stored, for a kernel that multiplies by the codes.

    Raises WeightsError if there are none, and for a scale that the kernel cannot represent."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        if not any(name.endswith(BLOCKS) for name in stored):
            file = next(iter(stored.values())).file
            advice = 'set model.quantization="none", which reads floats'
            raise WeightsError(f"{file}: no tensor is in MXFP4, though config.json says so; {advice}")
        super().__init__(stored)

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        part = super().part(name, dim, start, length, member)
        if name.endswith(SCALES) and part.numel() and (largest := int(part.max())) > LARGEST_SCALE:
            what = f"has a scale of {largest}, and the kernel takes {LARGEST_SCALE} at most"
            if largest == NO_SCALE:
                what = "contains NaN; the file is damaged"
            else:
                what += '; set model.quantization="none", which reads floats'
            raise WeightsError(f"{self.tensors[name].file}: tensor {name!r} {what}")
        return part


def decoded(blocks_OGB: Tensor, scales_OG: Tensor) -> Tensor:
    """Return weight_OI in float32, which is exact."""
    values = torch.tensor(VALUES)[codes(blocks_OGB).int()]
    return torch.ldexp(values, scales_OG[..., None].int() - BIAS).flatten(-2)


def codes(blocks: Tensor) -> Tensor:
    """Return the codes of blocks, uint8.  The lower half of a byte is the first of two neighbours."""
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)


def _upright(stored: StoredTensor) -> StoredTensor:
    """Return a stack of floats, [E, I, O], as it is seen, and another tensor as it is."""
    if len(stored.shape) != len("EIO"):
        return stored
    experts, inputs, outputs = stored.shape
    return replace(stored, shape=(experts, outputs, inputs))


def _stack(name: str, blocks: StoredTensor, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    scales = stored.get(f"{name}{SCALES}")
    if scales is None:
        raise WeightsError(f"{blocks.file}: tensor {blocks.name!r} needs the tensor '{name}{SCALES}', which is missing")
    if blocks.shape != (*scales.shape, GROUP_BYTES) or len(scales.shape) != 3 or scales.dtype != "U8":
        seen = f"{list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        expected = f"[experts, outputs, groups, {GROUP_BYTES}] and U8 [experts, outputs, groups]"
        raise WeightsError(
            f"{blocks.file}: tensors {blocks.name!r} and {scales.name!r} are {seen}, expected {expected}"
        )
    experts, outputs, groups = scales.shape
    return StoredTensor(
        blocks.file, name, "F32", (experts, outputs, groups * GROUP), blocks.num_bytes + scales.num_bytes
    )
