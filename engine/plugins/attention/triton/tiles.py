"""How large the pieces are that a kernel works on: the choices that cost time when they are wrong, and nothing else.

Owns: what a GPU has of processors and shared memory, the defaults and the candidates among which tuning chooses.
Does not know: kernels, measurements.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

TILE_BYTES = 16 << 10
MAX_PROGRAMS_PER_PROCESSOR = 8
INTERPRETED = "interpreter"
MAX_HEAD_SIZE = 256  # of keys and values of their own; beyond are latents


@dataclass(frozen=True, slots=True)
class Processors:
    """What the kernels run on.  shared_bytes: of memory that one processor has for its programs' tiles."""

    name: str
    count: int
    shared_bytes: int


class DecodeTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """block_keys: per tile.  programs: launched per processor; their shares of the work are equal."""

    block_keys: int
    num_warps: int
    num_stages: int
    # Room for parts of results is made for so many.
    programs: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROGRAMS_PER_PROCESSOR)]


class PrefillTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """block_rows: queries times the query heads of a KV head.  block_keys: per tile."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


def processors_of(device: torch.device) -> Processors:
    """The processors of a GPU; on the CPU few, so that what is shared among programs is shared among few."""
    if device.type == "cpu":
        return Processors(INTERPRETED, count=4, shared_bytes=227 << 10)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 << 10)
    return Processors(properties.name, properties.multi_processor_count, shared_bytes)


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def default_decode(head_size: int, itemsize: int, processors: Processors, converted: bool = False) -> DecodeTiles:
    """Three programs per processor of an H200, each with two tiles of 16 KB keys and 16 KB values on their way.

    Decoding is reading.  A processor's part of 4.3 TB/s takes 26 KB under way at 800 ns, so 192 KB leave room for
    programs that begin, end or compute.  Registers allow three programs of four warps too, and all of them run at once.
    converted: whether keys and values become another type on their way, for which registers hold them twice.
    """
    block_keys = min(128, max(16, TILE_BYTES // (padded(head_size) * itemsize)))
    for num_stages in (3, 2):
        tiles = DecodeTiles(block_keys, num_warps=4, num_stages=num_stages, programs=1)
        fitting = processors.shared_bytes // decode_bytes(tiles, head_size, itemsize)
        if fitting > 1:
            break
    most = 2 if head_size > MAX_HEAD_SIZE or converted else 3  # that registers allow
    return msgspec.structs.replace(tiles, programs=max(1, min(most, fitting)))


def decode_candidates(
    head_size: int, itemsize: int, processors: Processors, converted: bool = False
) -> list[DecodeTiles]:
    """The default first, then smaller, larger and more tiles, as far as they fit."""
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


def default_prefill(head_size: int, itemsize: int, processors: Processors) -> PrefillTiles:
    """The first candidate that fits; float32, which tensor cores would round, gets tiles that fit into registers."""
    if itemsize > 2:
        return PrefillTiles(block_rows=16, block_keys=16, num_warps=4, num_stages=2)
    candidates = prefill_candidates(head_size, itemsize, processors)
    return candidates[0] if candidates else PrefillTiles(block_rows=64, block_keys=32, num_warps=4, num_stages=2)


def prefill_candidates(head_size: int, itemsize: int, processors: Processors) -> list[PrefillTiles]:
    """Best guess first; empty where there is nothing to choose.

    128 rows first: with fewer, all programs together would ask more keys of the L2 cache than it delivers.
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
    """Shared memory of one program, with what it needs beside its tiles; the pipeline's last stage needs none."""
    return 2 * (tiles.num_stages - 1) * tiles.block_keys * padded(head_size) * itemsize + (8 << 10)


def prefill_bytes(tiles: PrefillTiles, head_size: int, itemsize: int) -> int:
    """Shared memory of one program: its queries, and keys and values of every stage."""
    return (tiles.block_rows + 2 * tiles.num_stages * tiles.block_keys) * padded(head_size) * itemsize + (1 << 10)
