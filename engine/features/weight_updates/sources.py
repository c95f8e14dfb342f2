"""The places that new weights come from: checkpoints, files of some tensors, memory; and what an update begins with.

Owns: which places a request may name, the checkpoints that are made of some tensors, the memory that they are in.
Does not know: ranks, when weights change, HTTP.
"""

import hashlib
import itertools
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.checkpoints.checkpoint import ModelSpec, resolve_checkpoint
from engine.checkpoints.fingerprint import fingerprint
from engine.checkpoints.shards import MAX_HEADER_BYTES, read_header, read_shards
from engine.config import Config
from engine.features.weight_updates.files import linked, overlay
from engine.features.weight_updates.memory import HeldMemory, is_place
from engine.features.weight_updates.messages import Announced, Weights
from engine.plugins.families import read_model
from engine.types.errors import FieldError, RequestError, WeightsError

FOLDER: Final = "weights"  # in storage.folder
WIDEST: Final = 16  # bytes of an element: an index and a value
MOST_PIECES: Final = 256  # each may hold a descriptor


class Sources:
    """The weights that an engine may change to.  Its methods read files: each call is made on a thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._memory = HeldMemory()
        self._most_bytes: dict[Path, int] = {}

    def most_bytes(self, config: Config) -> int:
        """Return the bytes that a file of tensors of this model may have."""
        if (first := _first(config)) not in self._most_bytes:
            numbers = sum(math.prod(one.shape) for one in read_shards(first).values())
            self._most_bytes = {first: WIDEST * numbers + MAX_HEADER_BYTES}
        return self._most_bytes[first]

    def digest(self, present: Weights, config: Config) -> str:
        """Return the digest of the present weights."""
        return present.digest or self._fingerprint(_read(_first(config), config), config)

    def received(self, path: str, config: Config) -> Path:
        """Return a place that stays: memory is held from now on."""
        return self._memory.hold(Path(path), self.most_bytes(config)) if is_place(Path(path)) else Path(path)

    def weights(self, paths: Sequence[Path], present: Weights, config: Config, *, version: str, digest: str) -> Weights:
        """Return the weights of a checkpoint's directory, or of the present ones with the tensors of files.

        digest: of the weights, or the SHA-256 of the only file; '' for any.  Raises WeightsError, and RequestError for
        another digest."""
        directory, also = paths[0], ""
        if len(paths) > 1 or directory.is_file():
            if digest and len(paths) == 1:
                with directory.open("rb") as file:
                    also = hashlib.file_digest(file, "sha256").hexdigest()
            directory = self._with_tensors(paths, present, config)
        spec = _read(directory, config)
        found = self._fingerprint(spec, config)
        if digest and digest not in (found, also):
            raise RequestError(
                f"{paths[0]}: its digest is {also or found}, not {digest:.80}; the files have changed since, or "
                "another one was meant",
                param="digest",
            )
        return Weights(0, version, str(spec.directory), found)

    def _with_tensors(self, paths: Sequence[Path], present: Weights, config: Config) -> Path:
        """Return a checkpoint that has the tensors of files and for the rest those of the present weights."""
        self._made = self._made or tempfile.TemporaryDirectory(prefix="callboard-weights-")
        made = Path(self._made.name)
        base = Path(present.directory) if present.directory else _first(config)
        directory = made / str(next(self._numbers))
        overlay(paths, base, directory, self.digest(present, config), self._memory)
        return directory

    def _fingerprint(self, spec: ModelSpec, config: Config) -> str:
        return fingerprint(spec, config.model.load_format)

    def keep(self, present: Weights) -> None:
        """Forget all that was made or received but for the present weights."""
        directory, places = Path(present.directory), set[Path]()
        for old in [] if self._made is None else [*Path(self._made.name).iterdir()]:
            if old == directory:
                places = linked(directory)  # a checkpoint that is not made here has no memory, and may be gone
            else:
                shutil.rmtree(old)
        self._memory.keep(places)

    def close(self) -> None:
        """Remove the checkpoints that were made here, which have links alone, and let the memory go."""
        self._memory.keep(set())
        if self._made is not None:
            self._made.cleanup()


def sent_place(path: str, config: Config) -> Path:
    """Return the place that a request names.  Raises FieldError for one that it may not name."""
    if path == config.model.path:
        return resolve_checkpoint(path, config.model.revision)
    folder = Path(config.storage.folder, FOLDER).resolve()
    try:
        found = (folder / path).resolve()
    except (OSError, RuntimeError, ValueError):  # a link to itself, a zero byte
        found = Path("/")
    if not config.storage.folder or not found.is_relative_to(folder):
        raise FieldError(
            "path", f"{path[:200]!r} is neither model.path nor below {FOLDER}/ in storage.folder; save it there"
        )
    return found


def check_announced(path: Path, announced: Sequence[Announced]) -> None:
    """Raise WeightsError unless a file has the tensors that were announced, and no other."""
    found = {name: (name, one.dtype, one.shape) for name, one in read_header(path).items()}
    for one in announced:
        if (there := found.pop(one[0], None)) != one:
            raise WeightsError(f"{path}: tensor {one[0]!r} is {there and there[1:]}, but {one[1:]} was announced")
    if found:
        raise WeightsError(f"{path}: tensor {min(found)!r} was not announced")


def _first(config: Config) -> Path:
    return resolve_checkpoint(config.model.path, config.model.revision)


def _read(directory: Path, config: Config) -> ModelSpec:
    return read_model(directory, config.plugins, config.model)
