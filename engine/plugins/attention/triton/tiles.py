"""Tile sizes of the kernels: choices that affect the time, and nothing else.

Owns: a GPU's processors and shared memory, the defaults, and the candidates for tuning.
Does not know: kernels, measurements.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

TILE_BYTES = 16 << 10
MAX_PROGRAMS_PER_PROCESSOR = 8
INTERPRETED = "interpreter"
MAX_HEAD_SIZE = 256  # of separate keys and values; larger ones are latents


@dataclass(frozen=True, slots=True)
class GpuProcessors:
    """The processors that run the kernels.  shared_bytes: memory of one processor for its programs' tiles."""

    name: str
    count: int
    shared_bytes: int


class DecodeTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tiles of decode kernels.

    block_keys: per tile.  programs: launched per processor; their shares of the work are equal."""

    block_keys: int
    num_warps: int
    num_stages: int
    # Memory for partial results is allocated for this many.
    programs: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROGRAMS_PER_PROCESSOR)]


class PrefillTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tiles of prefill kernels.

    block_rows: queries times the query heads of a KV head.  block_keys: per tile."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


def processors_of(device: torch.device) -> GpuProcessors:
    """Return the processors of a GPU; few on the CPU, so that work is shared among few programs."""
    if device.type == "cpu":
        return GpuProcessors(INTERPRETED, count=4, shared_bytes=227 << 10)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 << 10)
    return GpuProcessors(properties.name, properties.multi_processor_count, shared_bytes)


def padded(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def default_decode(head_size: int, itemsize: int, processors: GpuProcessors, converted: bool = False) -> DecodeTiles:
    """Return three programs per processor of an H200, each with two tiles of 16 KB keys and 16 KB values in flight.

    Decoding is bound by reads.  A processor's share of 4.3 TB/s needs 26 KB in flight at 800 ns, so 192 KB leave room
    for programs that begin, end or compute.  Registers allow three programs of four warps, which all run at once.
    converted: keys and values are converted to another type, so that registers hold them twice.
    """
    block_keys = min(128, max(16, TILE_BYTES // (padded(head_size) * itemsize)))
    for num_stages in (3, 2):
        tiles = DecodeTiles(block_keys, num_warps=4, num_stages=num_stages, programs=1)
        fitting = processors.shared_bytes // decode_bytes(tiles, head_size, itemsize)
        if fitting > 1:
            break
    most = 2 if head_size > MAX_HEAD_SIZE or converted else 3  # the most that registers allow
    return msgspec.structs.replace(tiles, programs=max(1, min(most, fitting)))


def decode_candidates(
    head_size: int, itemsize: int, processors: GpuProcessors, converted: bool = False
) -> list[DecodeTiles]:
    """Return the default first, then smaller, larger and more tiles, as far as they fit."""
    default = default_decode(head_size, itemsize, processors, converted)
    keys = default.block_keys
    others = [
        DecodeTiles(keys, 4, 3, 6),
        DecodeTiles(keys, 4, 2, 3),
        DecodeTiles(keys, 4, 2, 6),
        DecodeTiles(keys, 8, 3, 2),
        DecodeTiles(keys // 2, 4, 4, 4),
        DecodeTiles(keys // 2, 4, 3, 4),
        DecodeTiles(keys // 2, 4, 3, 8),
        DecodeTiles(keys * 2, 8, 2, 2),
        DecodeTiles(keys * 2, 4, 2, 3),
    ]
    return [default] + [
        tiles
        for tiles in others
        if tiles.block_keys >= 16 and decode_bytes(tiles, head_size, itemsize) <= processors.shared_bytes
    ]


def default_prefill(head_size: int, itemsize: int, processors: GpuProcessors) -> PrefillTiles:
    """Return the first candidate that fits; float32, which tensor cores would round, gets tiles that fit registers."""
    if itemsize > 2:
        return PrefillTiles(block_rows=16, block_keys=16, num_warps=4, num_stages=2)
    candidates = prefill_candidates(head_size, itemsize, processors)
    return candidates[0] if candidates else PrefillTiles(block_rows=64, block_keys=32, num_warps=4, num_stages=2)


def prefill_candidates(head_size: int, itemsize: int, processors: GpuProcessors) -> list[PrefillTiles]:
    """Return candidates, the best guess first; [] if there is no choice.

    128 rows come first: with fewer, all programs together would read more keys from the L2 cache than it delivers.
    """
    if itemsize > 2:
        return []
    if head_size > MAX_HEAD_SIZE:
        candidates = [PrefillTiles(64, 16, 8, 3), PrefillTiles(64, 16, 8, 2), PrefillTiles(32, 16, 4, 2)]
        return [tiles for tiles in candidates if prefill_bytes(tiles, head_size, itemsize) <= processors.shared_bytes]
    candidates = [
        PrefillTiles(128, 64, 8, 3),
        PrefillTiles(128, 64, 8, 2),
        PrefillTiles(128, 128, 8, 2),
        PrefillTiles(128, 32, 8, 3),
        PrefillTiles(64, 64, 4, 2),
        PrefillTiles(64, 64, 4, 3),
    ]
    if head_size > 128:  # wider tiles of keys spill registers
        candidates.sort(key=lambda tiles: tiles.block_keys)
    return [tiles for tiles in candidates if prefill_bytes(tiles, head_size, itemsize) <= processors.shared_bytes]


def decode_bytes(tiles: DecodeTiles, head_size: int, itemsize: int) -> int:
    """Return the shared memory of one program, with extra beyond its tiles; the pipeline's last stage needs none."""
    return 2 * (tiles.num_stages - 1) * tiles.block_keys * padded(head_size) * itemsize + (8 << 10)


def prefill_bytes(tiles: PrefillTiles, head_size: int, itemsize: int) -> int:
    """Return the shared memory of one program: its queries, and keys and values of every stage."""
    return (tiles.block_rows + 2 * tiles.num_stages * tiles.block_keys) * padded(head_size) * itemsize + (1 << 10)
