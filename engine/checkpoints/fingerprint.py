"""What tells one checkpoint from another without reading all of it: for machines that must have the same.

Owns: which bytes count.  Does not know: torch, what compares.
The weights' files count with their names, sizes, headers, and samples of their data: another model of the same shape is
noticed, and tens of gigabytes are not read for it.  The directory's name and files of other kinds do not count.
"""

import hashlib
import os
from pathlib import Path

import msgspec

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.gguf import stored_tensors
from engine.errors import ConfigError

SAMPLE_BYTES = 1 << 14
NUM_SAMPLES = 8  # of each file, evenly spread, the first with the header's beginning and the last with the file's end


def fingerprint(spec: ModelSpec, load_format: str) -> str:
    """Hashes of the shape and of the weights, if there are any, joined by a colon.  Raises WeightsError."""
    what = (spec.architecture, spec.shape, spec.dtype, spec.eos_token_ids)
    shape = hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).hexdigest()
    return f"{shape}:{_weights(spec.directory) if load_format != 'dummy' else ''}"


def check_fingerprint(expected: str, spec: ModelSpec, load_format: str, rank: int) -> None:
    """Raise ConfigError if the checkpoint of ``rank`` does not have the fingerprint ``expected``."""
    found = fingerprint(spec, load_format)
    if found != expected:
        same_shape = found.partition(":")[0] == expected.partition(":")[0]
        what = "its weights are others" if same_shape else "its shape is another"
        raise ConfigError(f"rank {rank}: model.path={spec.directory}: not the checkpoint that rank 0 has; {what}")


def _weights(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({tensor.file for tensor in stored_tensors(directory).values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb", buffering=0) as file:
            for number in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
