"""The weights of a checkpoint under the names that the model has for them, whatever their format.

Owns: reading plain tensors from safetensors files.  Does not know: which tensors a model needs, other formats.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoints.shards import StoredTensor
from engine.layers.packing import StoredRows
from engine.types.errors import WeightsError

# Every float type of a weight; 8-bit floats without a scale are ordinary numbers.
LOADABLE = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")
CODES = ("U8",)  # of weights whose codes a kernel reads


class WeightReader(Protocol):
    """Tensors by name.  tensors: as the model sees them, but with the file and num_bytes of the stored ones."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """Return [start : start + length] along ``dim`` as floats.  Raises WeightsError naming file and tensor.

        member: index of the matrix in a stack of matrices; ``dim`` is then one of the matrix."""

    def rows(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> StoredRows | None:
        """Return the same part of a matrix as its file stores it; None if that is no format of ``StoredRows``, or if
        the part begins or ends within a row's blocks."""

    def close(self) -> None:
        """Close all files."""


class SafetensorsReader:
    """Tensors as they are in safetensors files; a file is opened once, when it is needed.

    A tensor's name in its file is ``StoredTensor.name``, which may differ from the model's."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.tensors = stored
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    def part(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> Tensor:
        """Return a part of a tensor.  Only these rows or columns are read from the file."""
        where = slice(start, start + length)
        place = (where,) if dim == 0 else (slice(None), where)
        stored = self.tensors[name]
        if not stored.shape:
            return self.whole(name).view(1)
        try:
            part: Tensor = self._file(stored.file).get_slice(stored.name)[place if member is None else (member, *place)]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{stored.file}: {error}") from None
        return part.float() if part.is_floating_point() and part.dtype.itemsize == 1 else part

    def rows(self, name: str, dim: int, start: int, length: int, member: int | None = None) -> StoredRows | None:
        """Return None: the file has floats."""

    def whole(self, name: str) -> Tensor:
        """Return a tensor as it is stored; it may be one of integers."""
        stored = self.tensors[name]
        try:
            tensor: Tensor = self._file(stored.file).get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{stored.file}: {error}") from None
        return tensor

    def close(self) -> None:
        self._open.close()
        self._files.clear()

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._files[path]
