"""Tiles by measurement: which were fastest here for which sizes, kept in a file so that it is measured once.

Owns: the file and what it is valid for.  Does not know: kernels, what is timed.
A file that is missing, broken or cannot be written costs time, never the start: the defaults serve.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import triton

from engine.host.cache_folder import cache_folder, replace_file
from engine.plugins.attention.triton.tiles import DecodeTiles, PrefillTiles

log = logging.getLogger(__name__)

T = TypeVar("T")
STEP = 4


class TileTable(msgspec.Struct, forbid_unknown_fields=True):
    """size -> what was fastest; see ``size_key``."""

    decode: dict[str, DecodeTiles] = {}
    prefill: dict[str, PrefillTiles] = {}


def bucket(count: int) -> int:
    """The next power of ``STEP``: sizes that are served alike."""
    size = 1
    while size < count:
        size *= STEP
    return size


def size_key(shape: str, batch_size: int, context: int) -> str:
    """shape: all that does not change from step to step.  context: positions that a row's page table has room for."""
    return f"{shape} batch {bucket(batch_size)} context {bucket(context)}"


def nearest(tiles: Mapping[str, T], shape: str, batch_size: int, context: int) -> T | None:
    """The tiles of this size, or of the next smaller one that has some: first of the batch, then of the context."""
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
    """Where the table of this device, triton and kernel source lies; None without a home."""
    folder = cache_folder("attention.triton")
    if folder is None:
        return None
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    device = re.sub(r"\W+", "_", device_name)
    return folder / f"{device}-{triton.__version__}-{digest.hexdigest()[:16]}.json"


def load_table(path: Path | None) -> TileTable:
    """The table in the file, or an empty one."""
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
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(table), indent=1))
    except OSError as error:
        log.warning("attention.triton: tiles are not kept for the next start: %s", error)
