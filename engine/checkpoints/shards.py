"""The safetensors files of a checkpoint and their tensors, checked in full before a weight is read.

A file is 8 bytes header length (little endian), the header as JSON, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
Owns: headers and the shard index.  Does not know: torch, which tensors a model needs.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from engine.checkpoints.fields import read_fields
from engine.types.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# The limit of the reference implementation; 100 MB of JSON describe about a million tensors.
MAX_HEADER_BYTES = 100_000_000
# Limits of a torch tensor.
MAX_DIMENSIONS = 64
MAX_DIMENSION = (1 << 63) - 1
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: its place and its form.  dtype: in safetensors' spelling, e.g. BF16."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_shards(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name.  Raises WeightsError naming the file and the tensor at fault.

    A single file takes precedence over shards, as in transformers: they may be older than it.
    """
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        return _read_sharded(directory)
    problem = f"{directory}: no weights; expected {SINGLE_FILE}, or {INDEX_FILE} and its shards"
    if pickled := sorted(one.name for one in directory.glob("*") if one.suffix in PICKLED):
        problem += (
            f"; {pickled[0]} is a format that is not read, since loading it may run what is in it; to convert a model "
            "that you trust: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW) of transformers"
        )
    elif others := sorted(one.name for one in directory.glob("*.gguf")):
        problem += f"; to read {others[0]}, name that file instead of its directory"
    raise WeightsError(problem)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file; every offset is checked against the file's size."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise WeightsError(f"{path}: {size} bytes, too short for a safetensors file; it is truncated")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise WeightsError(f"{path}: header of {header_bytes} bytes in a file of {size}; truncated or damaged")
            raw = file.read(header_bytes)
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file, but the checkpoint's index names it; a shard is missing") from None
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from None
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: header is {type(header).__name__}, expected a JSON object")
    header.pop("__metadata__", None)
    places = {name: _read_entry(path, name, entry) for name, entry in header.items()}
    _check_places(path, places, size - 8 - header_bytes)
    return {name: tensor for name, (tensor, _) in places.items()}


def _read_entry(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """Return one header entry and the offset at which it starts."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise WeightsError(f"{where}: header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise WeightsError(f"{where}: dtype {dtype!r}, expected one of {', '.join(sorted(DTYPE_BYTES))}")
    if not _are_sizes(shape):
        raise WeightsError(f"{where}: shape {shape!r}, expected a list of {MAX_DIMENSIONS} sizes at most")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{where}: data_offsets {offsets!r}, expected [begin, end]")
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        held = offsets[1] - offsets[0]
        raise WeightsError(f"{where}: holds {held} bytes, but {dtype} of shape {shape} needs {num_bytes}")
    return StoredTensor(path, name, dtype, tuple(shape), num_bytes), offsets[0]


def _check_places(path: Path, places: dict[str, tuple[StoredTensor, int]], data_bytes: int) -> None:
    """Check that the tensors cover the data exactly: no overlap, no gap, nothing past the end."""
    expected = 0
    for tensor, begin in sorted(places.values(), key=lambda place: (place[1], place[0].num_bytes)):
        if begin != expected:
            fault = "overlaps the tensor before it" if begin < expected else "leaves a gap before it"
            raise WeightsError(f"{path}: tensor {tensor.name!r} at offset {begin} {fault}, expected offset {expected}")
        expected = begin + tensor.num_bytes
        if expected > data_bytes:
            raise WeightsError(
                f"{path}: tensor {tensor.name!r} ends at byte {expected} of {data_bytes} in the file; it is truncated"
            )
    if expected != data_bytes:
        raise WeightsError(
            f"{path}: {data_bytes - expected} bytes after the last tensor; the header does not fit the file"
        )


def _read_sharded(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_FILE
    weight_map = read_fields(index).section("weight_map").table
    if not weight_map:
        raise WeightsError(f"{index}: weight_map is missing or empty, expected tensor names and their files")
    names_by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, file_name in weight_map.items():
        # A file name cannot leave the directory; a path could.
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise WeightsError(
                f"{index}: tensor {name!r} is in {file_name!r}, expected the name of a .safetensors file"
            )
        names_by_file[file_name].append(name)
    tensors: dict[str, StoredTensor] = {}
    for file_name, names in sorted(names_by_file.items()):
        held = read_header(directory / file_name)
        for name in names:
            if name not in held:
                raise WeightsError(
                    f"{directory / file_name}: tensor {name!r} is missing, but {INDEX_FILE} names this file for it"
                )
            tensors[name] = held[name]
    return tensors


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(one) is int and 0 <= one <= MAX_DIMENSION for one in value)
    )


def _refuse_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{key!r} appears twice")
        table[key] = value
    return table
