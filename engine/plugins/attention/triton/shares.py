"""How a decode batch is cut into equal shares, computed on the device by whoever needs to know.

Legend: B decode rows, some of them
Owns: the numbering of tiles and who gets which.  Does not know: keys, values, queries.

Row b's visible keys lie in tiles of BLOCK_N positions.  The tiles of all rows stand in one line, and each of a fixed
number of programs takes the same number of neighbours: however ragged the lengths, all end together.  The host looks at
no length to launch them, so a captured launch stays right when it is replayed with other lengths.
"""

import triton
import triton.language as tl


@triton.jit
def visible_tiles(length, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first tile, number of tiles) that a row's last position sees; no tiles for length 0.  Scalars or vectors."""
    first_tile = length * 0
    if WINDOW > 0:
        first_tile = tl.maximum(length - WINDOW, 0) // BLOCK_N
    return first_tile, tl.cdiv(length, BLOCK_N) - first_tile


@triton.jit
def count_tiles(lengths, num_rows, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of the first num_rows rows."""
    count_B = tl.zeros([BLOCK_B], tl.int32)
    for first_row in range(0, num_rows, BLOCK_B):
        row_B = first_row + tl.arange(0, BLOCK_B)
        length_B = tl.load(lengths + row_B, mask=row_B < num_rows, other=0)
        _, tiles_B = visible_tiles(length_B, WINDOW, BLOCK_N)
        count_B += tiles_B
    return tl.sum(count_B, 0)


@triton.jit
def find_row(lengths, num_rows, tile, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """(row that a tile of the line belongs to, number of that row's first tile).  Passes over rows without tiles."""
    row = tile * 0
    row_begin = tile * 0
    passed = tile * 0
    for first_row in range(0, num_rows, BLOCK_B):
        row_B = first_row + tl.arange(0, BLOCK_B)
        length_B = tl.load(lengths + row_B, mask=row_B < num_rows, other=0)
        _, tiles_B = visible_tiles(length_B, WINDOW, BLOCK_N)
        before_B = (row_B < num_rows) & (passed + tl.cumsum(tiles_B, 0) <= tile)
        row += tl.sum(before_B.to(tl.int32), 0)
        row_begin += tl.sum(tl.where(before_B, tiles_B, 0), 0)
        passed += tl.sum(tiles_B, 0)
    return row, row_begin


@triton.jit
def share_size(num_tiles, num_shares):
    """Tiles in one share; the last shares may get fewer, or none."""
    return tl.maximum(tl.cdiv(num_tiles, num_shares), 1)
