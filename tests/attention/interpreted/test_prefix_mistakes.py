"""Mistakes in the attention to a shared prefix are found: each is planted in the source of its kernels or their host.

The batch has a group with rows that end anywhere and one that leaves the prefix early, a smaller group with a longer
prefix, rows that share a page or nothing, and padding.  It is read twice, with other page tables the second time.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import backend, decode, prefix
from engine.plugins.attention.triton.tiles import DecodeTiles, GpuProcessors, PrefillTiles
from tests.attention.interpreted.test_prefix import CPU, KEYS, PAGE, Rows
from tests.kernels.interpreted.planting import with_mistake

SPEC = AttentionSpec(1, 2, 1, 8, 0.4, sinks=(torch.tensor([0.3, -0.2]),))
LONG = 130  # both prefixes are shorter
EDGE = 96  # the length of a row that ends with its sixth tile: the tile's last page is written by this step
SMALL = {"ROWS_AT_ONCE": 4, "CANDIDATES_AT_ONCE": 4, "PAGES_AT_ONCE": 8}  # so that each loop has several turns


def mixed_rows() -> tuple[Rows, list[int], int]:
    """Return rows, those that share the most, and one of these that is to end at an edge."""
    rows, members = Rows(), list[int]()
    most, longer = rows.pages(28), rows.pages(32)

    def add(prefix: list[int], length: int, *, is_member: bool = False) -> None:
        members.extend([len(rows.tables)] * is_member)
        rows.add(prefix, length)

    add([], 0)
    add(longer, LONG + 20)
    add([], 70)
    for own in (0, 14, 15):
        add(most, LONG + own, is_member=True)
    add(most[:25], LONG + 3, is_member=True)
    add(most, LONG + 9, is_member=True)
    at_edge = members[-1]
    add(longer, LONG + 5)
    add(most[:1], LONG + 2)
    add([], LONG)
    add([], LONG + 17)
    for own in (16, 31, 2, 7, 4):
        add(most, LONG + own, is_member=True)
    return rows, members, at_edge


def definition(pool: KVPool, batch: AttentionBatch, q_TNH: Tensor) -> Tensor:
    """Attention of each row to its own pages, with a sink for each head."""
    out_TNH = torch.zeros_like(q_TNH)
    for row, length in enumerate(batch.lengths_B.tolist()):
        if not length:
            continue
        at_L = torch.arange(length)
        slots_L = batch.page_table_BP[row].long()[at_L // PAGE] * PAGE + at_L % PAGE
        scores_NL = q_TNH[row] @ pool.keys(0)[slots_L, 0].T * SPEC.scale
        weights_NL = torch.cat((scores_NL, SPEC.sinks[0][:, None]), 1).softmax(1)[:, :-1]
        out_TNH[row] = weights_NL @ pool.values(0)[slots_L, 0]
    return out_TNH


def check(backend: ModuleType, prefix: ModuleType, decode: ModuleType, merged_bytes: int) -> None:
    """Compare the results for both contents of the batch with the definition, and the group that is found.

    merged_bytes: up to here parts are merged in the launch that computes them."""

    class Poisoned(prefix.SharedKeys):
        """Shared keys whose memory says nothing before a kernel has written it."""

        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            self.out.fill_(torch.nan)
            self.weight.fill_(torch.nan)

    vars(prefix).update(SMALL)
    kernels = {"decode_attention": decode.decode_attention, "merge_parts": decode.merge_parts}
    vars(backend).update(kernels, SharedKeys=Poisoned, LEAST_ROWS=2, MERGED_BYTES=merged_bytes)
    rows, members, at_edge = mixed_rows()
    pool = KVPool(1, rows._next, PAGE, 1, 8, torch.float32, CPU)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    attention = backend.TritonAttention(SPEC, pool, GpuProcessors("few", 3, 227 << 10))
    attention._default_decode = DecodeTiles(KEYS, num_warps=4, num_stages=2, programs=1)
    attention._default_prefill = PrefillTiles(16, KEYS, num_warps=4, num_stages=2)
    batch = rows.batch()
    q_TNH = torch.randn(len(rows.lengths), 2, 8, generator=torch.Generator().manual_seed(2))
    attention.plan_step(batch)
    batch.lengths_B[at_edge] = EDGE
    compare(attention, batch, q_TNH, members, EDGE // KEYS - 1)
    # The larger group's first row is no longer among the first ones that are read together.
    batch.lengths_B[at_edge] = LONG
    is_long, order = batch.lengths_B >= LONG, torch.arange(len(rows.lengths))
    order[is_long] = order[is_long].roll(-8)
    batch.page_table_BP.copy_(batch.page_table_BP[order].clone())
    batch.lengths_B.copy_(batch.lengths_B[order].clone())
    compare(attention, batch, q_TNH, [at for at, row in enumerate(order.tolist()) if row in members], 25 * PAGE // KEYS)


def compare(attention: Any, batch: AttentionBatch, q_TNH: Tensor, members: list[int], tiles: int) -> None:
    """Compare results with the definition, and the group that is found with the members and their shared tiles."""
    found = attention.attend(0, q_TNH)
    torch.testing.assert_close(found, definition(attention.pool, batch, q_TNH), rtol=1e-5, atol=1e-5)
    shared = attention._shared[0]
    count, found_tiles = shared._chosen.tolist()
    assert (shared._members_B[:count].tolist(), found_tiles) == (members, tiles)
    assert not attention._arrived.any()


def modules(folder: Path, module: ModuleType, right: str, wrong: str) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Return copies of the host's module, that of shared keys and that of decode rows, one with a mistake."""

    def copied(one: ModuleType) -> ModuleType:
        inside = folder / one.__name__
        inside.mkdir()
        assert one.__doc__ is not None
        texts = (right, wrong) if one is module else (one.__doc__, one.__doc__)
        return with_mistake(one, *texts, inside)

    return copied(backend), copied(prefix), copied(decode)


IN_ONE_LAUNCH, IN_TWO = 1 << 20, 0


@pytest.mark.parametrize("merged_bytes", [IN_ONE_LAUNCH, IN_TWO])
def test_a_mixed_batch_gets_what_the_definition_says(tmp_path: Path, merged_bytes: int):
    check(*modules(tmp_path, prefix, "SPLITS: Final = 4", "SPLITS: Final = 4"), merged_bytes)


MISTAKES = {
    "the page that is written is shared": (
        prefix,
        "whole = (tl.load(lengths + row) - 1)",
        "whole = tl.load(lengths + row)",
    ),
    "the last key of the prefix": (
        prefix,
        "num_keys = (first + num_mine) * BLOCK_N",
        "num_keys = (first + num_mine) * BLOCK_N - 1",
    ),
    "own keys begin a tile early": (decode, "length * 0 + skip", "tl.maximum(length * 0 + skip - 1, 0)"),
    "own keys begin a tile late": (decode, "length * 0 + skip", "length * 0 + skip + (skip > 0)"),
    "a split without the sum of its weights": (prefix, "highest_M + tl.log2(weight_M)", "highest_M"),
    "own keys without the sum of their weights": (
        decode,
        "tl.store(shared_weight + own + place_M, highest_M + tl.log2(weight_M)",
        "tl.store(shared_weight + own + place_M, highest_M",
    ),
    "a split behind the last tile is merged": (
        decode,
        "(split_S < SPLITS) & (split_S * tl.cdiv(skip, SPLITS) < skip)",
        "(split_S < SPLITS)",
    ),
    "the sink is counted twice": (decode, "alone = whole & (skip == 0)", "alone = whole"),
    "rows of another group": (prefix, "mine_B = leader_B == best_leader", "mine_B = tiles_B >= best_tiles"),
    "rows with one page in common": (prefix, "tl.where(mine_P == theirs_P, limit, p_P)", "limit + p_P"),
    "pages behind the first ones are not compared": (
        prefix,
        "for first in range(0, limit, BLOCK_P):",
        "for first in range(0, tl.minimum(limit, BLOCK_P), BLOCK_P):",
    ),
    "a leader among the first rows alone": (
        prefix,
        "for first in range(0, row, BLOCK_B):",
        "for first in range(0, tl.minimum(row, BLOCK_B), BLOCK_B):",
    ),
    "the length of another group's prefix": (
        prefix,
        "tiles = tl.sum(tl.where(c_C == leader, tiles_C, 0), 0)",
        "tiles = tl.max(tl.where(saved_C > 0, tiles_C, 0), 0)",
    ),
    "the longest of a group's prefixes": (
        prefix,
        "tiles_C = tl.min(tl.where(alike_CB, tiles_B[None, :], 1 << 30), 1)",
        "tiles_C = tl.max(tl.where(alike_CB, tiles_B[None, :], 0), 1)",
    ),
    "pages of the first row": (prefix, "page_table + tl.load(members).to(tl.int64) * table_stride", "page_table"),
    "results in the places of others": (prefix, "(split * num_rows + row_M)", "(split * num_rows + place_M)"),
    "queries of others": (prefix, "q_M = row_M * q_stride", "q_M = place_M * q_stride"),
    "the last row of a group": (prefix, "(place_M < count)", "(place_M < count - 1)"),
    "the rows behind whole blocks": (prefix, "block * QUERIES >= count", "(block + 1) * QUERIES > count"),
    "programs for whole blocks alone": (prefix, "triton.cdiv(num_rows, constants", "(num_rows // constants"),
    "the group of the step before": (
        backend,
        "self._compared is not batch or layer == self._first_full",
        "self._compared is not batch",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, tmp_path: Path):
    with pytest.raises(AssertionError):
        check(*modules(tmp_path, *MISTAKES[mistake]), IN_ONE_LAUNCH)


def test_a_row_that_shares_and_is_not_merged_is_found(tmp_path: Path):
    merged_alone = "(row_tiles == 0) | (last_share > first_share)"
    with pytest.raises(AssertionError):
        check(*modules(tmp_path, decode, merged_alone + " | (skip > 0)", merged_alone), IN_TWO)
