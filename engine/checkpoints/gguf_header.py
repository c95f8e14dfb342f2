"""The header of a GGUF file: its metadata, and its tensors with their places.

A file is a magic word, a version, two counts, keys with typed values, the tensors' entries, and the tensors' data, each
at a multiple of the alignment (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
Owns: the format, and its limits.  Does not know: what keys mean, how blocks of numbers are decoded.
"""

import math
import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import msgspec

from engine.types.errors import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
TEXT, LIST = 8, 9  # types of values; the others have a fixed size
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Number in the file -> name, numbers in a block, and its bytes.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


class GGUFTensor(msgspec.Struct, frozen=True):
    """A tensor of a GGUF file.  kind: of its blocks.  shape: the outermost size first.  offset: in the file.

    part: the index of the file, of a model in several."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    part: int = 0


class GGUFHeader:
    """The header, read in full.  tensors: in the file's order, each within the file.  files: by part."""

    def __init__(self, path: Path) -> None:
        """Read it.  Raises WeightsError naming the file."""
        self.path = path
        self.files = [path]
        self.tensors: list[GGUFTensor] = []
        self._values: dict[str, Any] = {}
        self._at = 0
        try:
            with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                self._read(data)
        except OSError as error:
            raise WeightsError(f"{path}: {error.strerror or error}") from None
        except (struct.error, OverflowError):
            size = path.stat().st_size
            what = f"not a GGUF file that can be read: it ends at byte {size}, within its header; it is truncated"
            raise WeightsError(f"{path}: {what}") from None
        except ValueError as error:
            raise WeightsError(f"{path}: not a GGUF file that can be read: {error}") from None

    def value(self, key: str) -> Any:
        """Return a number, a text, a list of either, or None if there is none.  Raises WeightsError for a text that is
        not UTF-8."""
        found = self._values.get(key)
        try:
            if isinstance(found, list):
                return [one.decode() for one in found]
            if isinstance(found, tuple):
                return list(found)
            return found.decode() if isinstance(found, bytes) else found
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path}: {key} cannot be read: {error}") from None

    def _read(self, data: mmap) -> None:
        if data[:4] != MAGIC:
            raise ValueError(f"it begins with {data[:4]!r}, expected {MAGIC!r}")
        self._at = 4
        (version,) = self._unpack(data, "<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, expected 2 or 3, little endian")
        num_tensors, num_values = self._unpack(data, "<QQ")
        for _ in range(num_values):
            key = self._text(data).decode()
            if key in self._values:
                raise ValueError(f"key {key!r} appears twice")
            self._values[key] = self._value(data, *self._unpack(data, "<I"))
        entries = [self._entry(data) for _ in range(num_tensors)]
        alignment = self._values.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment!r}, expected a multiple of 8")
        start = -(-self._at // alignment) * alignment
        for name, *_, offset in entries:
            if offset % alignment:
                raise ValueError(f"tensor {name!r} is at offset {offset}, expected a multiple of {alignment}")
        self.tensors = [_placed(*entry, start, len(data)) for entry in entries]
        if len({one.name for one in self.tensors}) < len(entries):
            raise ValueError("two tensors have the same name")

    def _unpack(self, data: mmap, form: str) -> Any:
        found = struct.unpack_from(form, data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _bytes(self, data: mmap, length: int) -> bytes:
        end = self._at + length
        if end > len(data):
            raise struct.error
        found = data[self._at : end]
        self._at = end
        return found

    def _text(self, data: mmap) -> bytes:
        return self._bytes(data, *self._unpack(data, "<Q"))

    def _value(self, data: mmap, kind: int) -> Any:
        if kind == TEXT:
            return self._text(data)
        if kind == LIST:
            of, count = self._unpack(data, "<IQ")
            return self._texts(data, count) if of == TEXT else self._numbers(data, of, count)
        return self._numbers(data, kind, 1)[0]

    def _numbers(self, data: mmap, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in NUMBERS:
            raise ValueError(f"a value of type {kind} at byte {self._at}, which is not known or may not be in a list")
        form = NUMBERS[kind]
        numbers = self._bytes(data, struct.calcsize(f"<{form}") * count)
        return struct.unpack(f"<{count}{form}", numbers)

    def _texts(self, data: mmap, count: int) -> list[bytes]:
        """Return a list of texts.  Vocabularies have 100,000 of them, so this is one loop without calls."""
        at, size, unpack, found = self._at, len(data), struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            (length,) = unpack(data, at)
            start, at = at + 8, at + 8 + length
            if at > size:
                raise struct.error
            found.append(data[start:at])
        self._at = at
        return found

    def _entry(self, data: mmap) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text(data).decode()
        (num_dimensions,) = self._unpack(data, "<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions, expected {MAX_DIMENSIONS} at most")
        shape = self._unpack(data, f"<{num_dimensions}Q")[::-1]
        return name, shape, *self._unpack(data, "<IQ")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, size: int) -> GGUFTensor:
    """Return a tensor from its entry.  start: of the data.  size: of the file."""
    if kind not in KINDS:
        raise ValueError(f"tensor {name!r} has type {kind}, which is not known")
    kind_name, block, block_bytes = KINDS[kind]
    if shape and shape[-1] % block:
        raise ValueError(f"tensor {name!r} in {kind_name} has rows of {shape[-1]}, expected a multiple of {block}")
    num_bytes = math.prod(shape) // block * block_bytes
    if start + offset + num_bytes > size:
        end = start + offset + num_bytes
        raise ValueError(f"tensor {name!r} ends at byte {end} of {size} in the file; it is truncated")
    return GGUFTensor(name, kind_name, shape, start + offset, num_bytes)
