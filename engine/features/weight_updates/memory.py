"""Tensors in memory without a file's name: they are received, held while weights are in use, and written.

Owns: the descriptors that are held, and when memory is copied.
Does not know: tensors' meaning, what has sent them.

Memory that is sealed, so that nothing can change it any more, is used as it is; other memory is copied once, so that
its owner may write to it again.  Ranks open it by the place that ``/proc`` has for it, as they open a file.
"""

import ctypes
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from engine.types.errors import WeightsError

PLACES: Final = Path("/proc")
SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8  # no further seals, no shrinking, no growing, no writing; as in fcntl.h
CHUNK: Final = 1 << 30
SPELLINGS: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class TensorBytes(NamedTuple):
    """A tensor in safetensors' words.  dtype: its spelling.  buffer: of its bytes, which ``owner`` keeps."""

    dtype: str
    shape: tuple[int, ...]
    buffer: Any
    owner: Any = None


def new_memory() -> int:
    """Return the descriptor of new memory, which is empty.  Raises WeightsError where there is none."""
    if not hasattr(os, "memfd_create") or not PLACES.is_dir():
        raise WeightsError("weights in memory need Linux; save them as a file")
    return os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(memory: int) -> None:
    """Let nothing change the memory any more.  No mapping of it may be writable."""
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)


def is_sealed(memory: int) -> bool:
    """Return whether nothing can change what a descriptor has."""
    try:
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # a file
        return False


def place(memory: int) -> Path:
    """Return the place by which every process of the same user opens the memory while this one holds it."""
    return PLACES / str(os.getpid()) / "fd" / str(memory)


def is_place(path: Path) -> bool:
    """Return whether a path is a ``place``."""
    return path.is_relative_to(PLACES) and path.parent.name == "fd"


def parts_of(tensors: Mapping[str, Any]) -> dict[str, TensorBytes]:
    """Return the parts of tensors of torch or arrays of numpy, which must stay as long as these.

    A tensor is copied only if it is on another device or has gaps.  Raises WeightsError for other things."""
    return {name: _part(name, one) for name, one in tensors.items()}


def _part(name: str, given: Any) -> TensorBytes:
    dtype = SPELLINGS.get(str(getattr(given, "dtype", "")).removeprefix("torch."))
    if dtype is None:
        raise WeightsError(f"tensor {name!r} is {type(given).__name__} of dtype {getattr(given, 'dtype', None)}")
    if isinstance(given, np.ndarray):
        return TensorBytes(dtype, given.shape, np.ascontiguousarray(given).reshape(-1).view(np.uint8), given)
    tensor = given.detach().cpu().contiguous()
    buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return TensorBytes(dtype, tuple(tensor.shape), buffer, tensor)


def write_tensors(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> int:
    """Return the descriptor of new, sealed memory with tensors in the layout of safetensors.  Raises WeightsError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    views, end = [memoryview(one.buffer).cast("B") for one in tensors.values()], 0
    for (name, one), view in zip(tensors.items(), views, strict=True):
        header[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [end, end := end + len(view)]}
    raw = json.dumps(header).encode()
    memory = new_memory()
    try:
        for view in (memoryview(len(raw).to_bytes(8, "little") + raw), *views):
            while view:
                view = view[os.write(memory, view[:CHUNK]) :]
        seal(memory)
    except OSError as error:
        os.close(memory)
        raise WeightsError(f"tensors do not fit into memory: {error.strerror or error}") from None
    return memory


class HeldMemory:
    """The memory that an engine holds: that of the present weights, and of the next ones."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def hold(self, path: Path, most: int) -> Path:
        """Return the place of the same content, which stays until ``keep`` leaves it out.

        path: of memory of this or another process.  most: bytes that it may have.  Raises WeightsError."""
        try:
            given = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(f"{path}: {error.strerror or error}") from None
        return self.take(given, most)

    def take(self, given: int, most: int) -> Path:
        """Do so for memory that has been received; the descriptor is this object's from now on."""
        try:
            facts = os.fstat(given)
            if not stat.S_ISREG(facts.st_mode):
                raise WeightsError("weights are neither memory nor a file; send the descriptor of one of them")
            if facts.st_size > most:
                raise WeightsError(f"weights of {facts.st_size} bytes; this model takes {most} at most")
            if not is_sealed(given):
                given = _replaced(given, _copied(given, facts.st_size))
        except WeightsError:
            os.close(given)
            raise
        self._held[found := place(given)] = given
        return found

    def write(self, tensors: Mapping[str, TensorBytes]) -> Path:
        """Return the place of new memory with tensors, see ``write_tensors``."""
        memory = write_tensors(tensors, {})
        self._held[found := place(memory)] = memory
        return found

    def keep(self, places: set[Path]) -> None:
        """Let go of all memory but this."""
        for path in self._held.keys() - places:
            os.close(self._held.pop(path))


def _replaced(given: int, other: int) -> int:
    os.close(given)
    return other


def _copied(given: int, num_bytes: int) -> int:
    """Return the descriptor of a sealed copy.  Raises WeightsError."""
    memory, done = new_memory(), 0
    try:
        while done < num_bytes and (more := os.sendfile(memory, given, done, min(CHUNK, num_bytes - done))):
            done += more
        seal(memory)
    except OSError as error:
        os.close(memory)
        raise WeightsError(f"weights of {num_bytes} bytes do not fit into memory: {error.strerror or error}") from None
    return memory
