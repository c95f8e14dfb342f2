"""Foreign bytes as a safetensors file, whose header is read before a weight is.

Owns: how bytes become a file.  A header in JSON gets its length in front of it, and ends at a NUL, before the data.
"""

import struct
from contextlib import suppress
from pathlib import Path

from engine.checkpoints.shards import read_header
from engine.types.errors import WeightsError


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    if data.startswith(b"{"):
        header, _, rest = data.partition(b"\0")
        data = struct.pack("<Q", len(header)) + header + rest
    path = folder / "model.safetensors"
    path.write_bytes(data)
    with suppress(WeightsError):
        read_header(path)
