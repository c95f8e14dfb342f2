"""Sparse deltas: for some tensors of the present weights the elements that differ, as flat indices and values.

Owns: the format, its checks, and the tensors that a delta makes of the present ones.
Does not know: torch, where files come from.

A delta is a safetensors file.  ``NAME.indices`` (I32 or I64, rising) and ``NAME.values`` (the tensor's dtype) stand for
the elements of NAME that change; a tensor under its own name is whole.  ``base`` of the metadata is the digest of the
weights that it is for.  Values take the place of others, and nothing is added, so no rounding depends on the way.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.checkpoints.shards import DTYPE_BYTES, StoredTensor
from engine.features.weight_updates.memory import TensorBytes
from engine.types.errors import WeightsError

INDICES: Final = ".indices"
VALUES: Final = ".values"
INDEX_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}

Bytes = np.ndarray[tuple[int, ...], np.dtype[Any]]


class TensorReader:
    """The bytes of tensors.  The header of each file is read once."""

    def __init__(self) -> None:
        self._begins: dict[Path, dict[str, int]] = {}

    def read(self, tensor: StoredTensor) -> Bytes:
        """Return a tensor's bytes, which are read when they are used."""
        if not tensor.num_bytes:
            return np.zeros(0, np.uint8)
        with tensor.file.open("rb") as file:
            if (begins := self._begins.get(tensor.file)) is None:
                num_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(num_bytes))
                header.pop("__metadata__", None)
                begins = {name: 8 + num_bytes + one["data_offsets"][0] for name, one in header.items()}
                self._begins[tensor.file] = begins
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8, tensor.num_bytes, begins[tensor.name])


def changed_names(tensors: Mapping[str, StoredTensor], known: Mapping[str, StoredTensor]) -> list[str]:
    """Return the tensors of which a file has some elements.  known: those of the present weights."""
    found = {name.removesuffix(end) for name in tensors for end in (INDICES, VALUES) if name.endswith(end)}
    return sorted(name for name in found if name in known)


def check_base(path: Path, present: str, *, is_sparse: bool) -> None:
    """Raise WeightsError unless a file is for the present weights.  present: their digest."""
    base = metadata(path).get("base")
    if base is None and is_sparse:
        raise WeightsError(f"{path}: elements of tensors without 'base' in its metadata, the digest that they are for")
    if base is not None and base != present:
        raise WeightsError(f"{path}: is for weights of digest {base!r:.80}, but the present ones have {present!r}")


def metadata(path: Path) -> Mapping[str, Any]:
    """Return the metadata of a file whose header has been read."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = header.get("__metadata__")
    return found if isinstance(found, dict) else {}


def applied(
    path: Path, name: str, tensors: Mapping[str, StoredTensor], base: StoredTensor, reader: TensorReader
) -> TensorBytes:
    """Return a tensor with the elements that a delta has.  Raises WeightsError."""
    for end in (INDICES, VALUES):
        if name + end not in tensors:
            raise WeightsError(f"{path}: tensor {name!r} has no {name + end!r}")
    places, new = tensors[name + INDICES], tensors[name + VALUES]
    if places.dtype not in INDEX_DTYPES or len(places.shape) != 1 or places.shape != new.shape:
        raise WeightsError(
            f"{path}: {name + INDICES!r} is {places.dtype} of shape {places.shape}, its values have {new.shape}; "
            f"expected {' or '.join(INDEX_DTYPES)} and one index for each value"
        )
    if new.dtype != base.dtype:
        raise WeightsError(f"{path}: {name + VALUES!r} is {new.dtype}, but the tensor is {base.dtype}")
    width = DTYPE_BYTES[base.dtype]
    whole = reader.read(base).view(f"V{width}").copy()
    indices = reader.read(places).view(INDEX_DTYPES[places.dtype])
    if len(indices) and (indices[0] < 0 or indices[-1] >= len(whole) or (indices[1:] <= indices[:-1]).any()):
        raise WeightsError(f"{path}: {name + INDICES!r} does not rise from 0 to below {len(whole)}")
    whole[indices] = reader.read(new).view(f"V{width}")
    return TensorBytes(base.dtype, base.shape, whole.view(np.uint8))


def difference(old: Mapping[str, TensorBytes], new: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """Return the parts of a delta from old tensors to new ones of the same names, dtypes and shapes.

    A tensor of which more than a third has changed is whole: its indices would be larger."""
    found: dict[str, TensorBytes] = {}
    for name, part in new.items():
        before, width = old[name], DTYPE_BYTES[part.dtype]
        if (before.dtype, before.shape) != (part.dtype, part.shape):
            raise WeightsError(f"tensor {name!r} was {before.dtype} {before.shape}, is {part.dtype} {part.shape}")
        was, now = (np.frombuffer(one.buffer, f"<u{width}") for one in (before, part))
        indices = np.flatnonzero(was != now)
        if len(indices) > len(now) // 3:
            found[name] = part
        elif len(indices):
            kind = "I32" if len(now) < 1 << 31 else "I64"
            places = indices.astype(INDEX_DTYPES[kind])
            found[name + INDICES] = TensorBytes(kind, places.shape, places.view(np.uint8))
            found[name + VALUES] = TensorBytes(part.dtype, places.shape, now[indices].view(np.uint8))
    return found
