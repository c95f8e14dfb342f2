"""The fingerprint of a checkpoint, which compares it byte for byte: for stored pages, journals, answers and ranks.

Owns: which files and facts count.  Does not know: torch, callers.
All bytes of the weights count, since fine-tunes of one base may differ in a few matrices.  The directory's name and
files of other kinds do not count.
"""

import hashlib
from pathlib import Path

import msgspec

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.file_digest import file_digests
from engine.checkpoints.gguf import stored_tensors
from engine.types.errors import ConfigError, WeightsError


def fingerprint(spec: ModelSpec, load_format: str) -> str:
    """Return hashes of the shape and of the weights, if there are any, joined by a colon.  Raises WeightsError."""
    what = (spec.architecture, spec.shape, spec.dtype, spec.eos_token_ids)
    shape = hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).hexdigest()
    return f"{shape}:{_weights(spec.directory) if load_format != 'dummy' else ''}"


def check_fingerprint(expected: str, spec: ModelSpec, load_format: str, rank: int) -> None:
    """Raise ConfigError if the checkpoint of ``rank`` does not have the fingerprint ``expected``."""
    found = fingerprint(spec, load_format)
    if found != expected:
        same_shape = found.partition(":")[0] == expected.partition(":")[0]
        what = "its weights differ" if same_shape else "its shape differs"
        raise ConfigError(f"rank {rank}: model.path={spec.directory}: not the checkpoint of rank 0; {what}")


def _weights(directory: Path) -> str:
    tensors = stored_tensors(directory)
    files = sorted({tensor.file for tensor in tensors.values()})
    try:
        digests = file_digests(files)
    except OSError as error:
        raise WeightsError(f"{error.filename}: {error.strerror or error}") from None
    contents = [(path.name, digest) for path, digest in zip(files, digests, strict=True)]
    # A tensor may be in two files; the index decides which one counts.
    places = sorted((name, tensor.file.name) for name, tensor in tensors.items())
    return hashlib.blake2b(msgspec.msgpack.encode((contents, places)), digest_size=16).hexdigest()
