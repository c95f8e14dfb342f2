"""Tiles by measurement: the fastest for each size, kept so that it is measured once.

Owns: the sizes, and what a table is valid for.  Does not know: kernels, what is timed, files.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import triton

from engine.host.kept_results import KeptResults
from engine.plugins.attention.triton.tiles import DecodeTiles, PrefillTiles

T = TypeVar("T")
STEP = 4


class TileTable(msgspec.Struct, forbid_unknown_fields=True):
    """The fastest tiles by size, see ``size_key``."""

    decode: dict[str, DecodeTiles] = {}
    prefill: dict[str, PrefillTiles] = {}


def bucket(count: int) -> int:
    """Return the next power of ``STEP``; sizes up to it share tiles."""
    size = 1
    while size < count:
        size *= STEP
    return size


def size_key(shape: str, batch_size: int, context: int) -> str:
    """Return the key of a size.

    shape: all that does not change from step to step.  context: positions that a row's page table has room for."""
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


def kept_table(device_name: str) -> KeptResults[TileTable]:
    """Return the table of this device, triton and kernel source, as it is kept for the next start."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return KeptResults("attention.triton tiles", f"{device_name} {triton.__version__}", digest.hexdigest(), TileTable)
