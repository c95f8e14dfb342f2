"""The files of one GGUF model: a single one, or parts that are numbered in their names and in their headers.

llama.cpp's ``llama-gguf-split`` writes ``NAME-00001-of-00003.gguf``; the first part has the metadata of the whole.
Owns: which files belong together, and the header of all of them.  Does not know: what keys mean.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from engine.checkpoints.gguf_header import GGUFHeader
from engine.types.errors import WeightsError

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
COUNT, NUMBER, NUM_TENSORS = "split.count", "split.no", "split.tensors.count"


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model that a file belongs to, the first part first.

    Raises WeightsError if one is missing.
    path: not resolved, since a cache of downloads links to files of other names."""
    found = PART.fullmatch(path.name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [path]
    count = int(found[3])
    paths = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, count + 1)]
    if missing := [one.name for one in paths if not one.is_file()]:
        names = f"{', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}"
        there = f"{count - len(missing)} of the {count} parts of a model are in its folder"
        raise WeightsError(f"{path}: {there}, and not {names}; put all parts into one folder")
    return paths


def model_name(path: Path) -> str:
    """Return the name of the model's file or files, without the number of a part and the ending."""
    found = PART.fullmatch(path.name)
    return found[1] if found else path.stem


def read_header(paths: Sequence[Path]) -> GGUFHeader:
    """Return the header of the first file with the tensors of all.  Raises WeightsError for parts of several models."""
    header, count = GGUFHeader(paths[0]), len(paths)
    if (expected := header.value(COUNT) or 1) != count:
        said = f"{paths[0]}: {COUNT} is {expected}, and {count} of the model's files are there"
        raise WeightsError(f"{said}; files of one model are named NAME-00001-of-{expected:05}.gguf and so on")
    for part, path in enumerate(paths if count > 1 else ()):
        own = GGUFHeader(path) if part else header
        if (seen := (own.value(NUMBER), own.value(COUNT))) != (part, count):
            raise WeightsError(f"{path}: {NUMBER} is {seen[0]} and {COUNT} is {seen[1]}, expected {part} and {count}")
        if part:
            header.tensors += [replace(one, part=part) for one in own.tensors]
            header.files.append(path)
    num_names, total = len({one.name for one in header.tensors}), header.value(NUM_TENSORS)
    if num_names < len(header.tensors):
        where = f"two of the {count} parts, so they are not of one model" if count > 1 else "the file twice"
        raise WeightsError(f"{paths[0]}: a tensor is in {where}")
    if count > 1 and total is not None and total != num_names:
        raise WeightsError(f"{paths[0]}: {NUM_TENSORS} is {total}, and the {count} parts have {num_names} tensors")
    return header
