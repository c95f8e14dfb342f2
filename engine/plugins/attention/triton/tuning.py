"""Measured tiles: the fastest for each size on this machine, kept in a file so that they are measured once.

Owns: the file and its validity.  Does not know: kernels, the measured work.
A missing, broken or unwritable file costs time, but does not fail the start: defaults are used.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import triton

from engine.plugins.attention.triton.tiles import DecodeTiles, PrefillTiles

log = logging.getLogger(__name__)

T = TypeVar("T")
STEP = 4


class TileTable(msgspec.Struct, forbid_unknown_fields=True):
    """A table of size -> its fastest tiles; ``size_key`` makes the keys."""

    decode: dict[str, DecodeTiles] = {}
    prefill: dict[str, PrefillTiles] = {}


def bucket(count: int) -> int:
    """Return the next power of ``STEP``; sizes up to it share tiles."""
    size = 1
    while size < count:
        size *= STEP
    return size


def size_key(shape: str, batch_size: int, context: int) -> str:
    """Return the key of a size.  shape: all that is constant over steps.  context: positions in a row's page table."""
    return f"{shape} batch {bucket(batch_size)} context {bucket(context)}"


def nearest(tiles: Mapping[str, T], shape: str, batch_size: int, context: int) -> T | None:
    """Return the tiles of this size, or of the next smaller one that has some: first in batch, then in context."""
    if not tiles:
        return None
    context = bucket(context)
    while context:
        rows = bucket(batch_size)
        while rows:
            if (found := tiles.get(size_key(shape, rows, context))) is not None:
                return found
            rows //= STEP
        context //= STEP
    return None


def table_path(device_name: str) -> Path | None:
    """Return the path of the table for this device, triton and kernel source; None without a home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    device = re.sub(r"\W+", "_", device_name)
    return base / "callboard" / "attention.triton" / f"{device}-{triton.__version__}-{digest.hexdigest()[:16]}.json"


def load_table(path: Path | None) -> TileTable:
    """Return the table in the file, or an empty one."""
    if path is None or not path.exists():
        return TileTable()
    try:
        return msgspec.json.decode(path.read_bytes(), type=TileTable)
    except (OSError, msgspec.DecodeError) as error:
        log.warning("attention.triton: tiles in %s are not used: %s", path, error)
        return TileTable()


def save_table(path: Path | None, table: TileTable) -> None:
    """Replace the file as a whole, so that a reader sees the old one or the new one."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))
        partial.replace(path)
    except OSError as error:
        log.warning("attention.triton: tiles are not kept for the next start: %s", error)
