"""Weights of a GGUF file as float32.

Legend: O outputs · I inputs · H head size
Owns: the numbers and their order.  Does not know: which tensors a model needs, how a kind of block is laid out.
"""

import mmap
import sys
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.gguf import read_table
from engine.checkpoints.gguf_families import BY_ARCHITECTURE
from engine.checkpoints.gguf_header import GGUFTensor
from engine.formats.blocks import DECODERS, PLAIN, decode
from engine.formats.value_heads import ValueHeads
from engine.layers.packing import StoredRows
from engine.types.errors import WeightsError

# Linux's flag, which this Python may not name: without it a file larger than all memory and swap cannot be mapped so.
NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    """Return a file's bytes, mapped as memory that torch takes for writable; nothing is written.

    Raises WeightsError if the system does not map it."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: the file cannot be mapped into memory ({error})") from error
    return np.frombuffer(mapping, np.uint8)


class GGUFWeights:
    """Tensors of GGUF files, which are mapped.  If rows allow it, only the blocks of a requested part are decoded."""

    def __init__(self, spec: ModelSpec) -> None:
        family = BY_ARCHITECTURE[spec.architecture]
        self._heads = {"q_proj": spec.shape.num_heads, "k_proj": spec.shape.num_kv_heads} if family.paired else {}
        self._values = ValueHeads.of(spec.shape) if family.by_turns else None
        self._shift = 1.0 if family.shifted else 0.0
        self._found = read_table(spec.directory)
        self.tensors = {
            name: replace(one, num_bytes=4 * prod(one.shape)) if self._as_floats(name, source) else one
            for name, (one, source) in self._found.items()
        }
        files = {tensor.part: stored.file for stored, tensor in self._found.values()}
        self._bytes = {part: torch.from_numpy(_mapped(path)) for part, path in files.items()}

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """Return a part of a tensor.  Stacks of experts are seen as a matrix per expert."""
        stored, source = self._found[name]
        rows = self._stored(source)
        if len(source.shape) < 2:
            weight = self._ordered(name, self._decoded(rows, source, stored.file)[0])
            if self._shift and source.name.endswith("norm.weight") and not source.name.endswith(".ssm_norm.weight"):
                weight = weight - self._shift
            if name.endswith(".A_log"):
                weight = weight.neg().log()  # a file has the rates themselves, below 0
            return weight.narrow(dim, start, length)
        rows = self._ordered(name, rows)
        weight = self._decoded(rows if dim else rows[start : start + length], source, stored.file)
        weight = weight.view(-1, *source.shape[1:])
        if self._values is not None:
            weight = self._values.inputs(name, weight)
        return weight.narrow(dim, start, length) if dim else weight

    def rows(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> StoredRows | None:
        """Return rows of blocks, in the model's order; None for a type without blocks, and for a part of the inputs."""
        stored, source = self._found[name]
        if len(stored.shape) != 2 or source.kind in PLAIN or (dim and length != stored.shape[1]):
            return None
        if self._as_floats(name, source):
            return None
        blocks = self._ordered(name, self._stored(source))
        if self._values is not None:
            blocks = self._values.inputs(name, blocks)
        where = f"{stored.file}: tensor {name!r}"
        return StoredRows(where, source.kind, blocks if dim else blocks[start : start + length], stored.shape[1])

    def _as_floats(self, name: str, source: GGUFTensor) -> bool:
        """Return whether a matrix cannot stay in blocks, since its inputs have another order."""
        if self._values is None or source.kind in PLAIN or len(source.shape) != 2:
            return False
        return self._values.cuts(name, source.num_bytes // source.shape[0], DECODERS.get(source.kind, (0,))[0])

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows, or numbers, of a tensor in the model's order."""
        if heads := self._heads.get(name.split(".")[-2], 0):
            rows = _unpaired(rows, heads)
        return rows if self._values is None else self._values.rows(name, rows)

    def _stored(self, source: GGUFTensor) -> Tensor:
        """Return the bytes of each row, where they are mapped; a vector is one row."""
        stored = self._bytes[source.part][source.offset : source.offset + source.num_bytes]
        return stored.view(source.shape[0] if len(source.shape) > 1 else 1, -1)

    def _decoded(self, rows: Tensor, source: GGUFTensor, path: Path) -> Tensor:
        kind = source.kind
        if kind in PLAIN or kind in DECODERS:
            return decode(rows, kind)
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(all="ignore"):  # the loader refuses NaN and infinity
                return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
        except ImportError:
            what = "blocks of this type are decoded with the gguf package: pip install 'callboard[gguf]'"
        except (NotImplementedError, ValueError) as error:
            what = str(error)
        raise WeightsError(f"{path}: tensor {source.name!r} of type {kind} cannot be read: {what}")

    def close(self) -> None:
        """Let go of the file."""
        self._found.clear()
        self._bytes.clear()


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of each head, stored as (0 H/2 1 H/2+1 ...), in their own order."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
