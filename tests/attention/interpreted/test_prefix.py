"""Decode rows that share pages: which are found, and the same results as without, however they lie in the batch."""

import pytest
import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import backend as backend_module
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.prefix import SharedKeys
from engine.plugins.attention.triton.tiles import DecodeTiles, GpuProcessors, PrefillTiles
from engine.plugins.support.paging import batch_on
from tests.attention.interpreted.test_shares import in_order

PAGE, KEYS = 4, 16
IN_ORDER = {"PDL": False}
CPU = torch.device("cpu")


class Rows:
    """Page tables of rows: each shares the first pages of a prefix and has others of its own."""

    def __init__(self) -> None:
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self._next = 0

    def pages(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def add(self, prefix: list[int], length: int) -> None:
        """Add a row whose first pages are those of the prefix."""
        self.tables.append(prefix + self.pages(max(0, -(-length // PAGE) - len(prefix))))
        self.lengths.append(length)

    def batch(self, num_decodes: int | None = None) -> AttentionBatch:
        width = max(1, *map(len, self.tables))
        table = torch.zeros((len(self.tables), width), dtype=torch.int32)
        for row, pages in enumerate(self.tables):
            table[row, : len(pages)] = torch.tensor(pages)
        lengths = torch.tensor(self.lengths, dtype=torch.int32).numpy()
        queries = torch.ones(len(lengths), dtype=torch.int32).numpy()
        return batch_on(CPU, len(lengths) if num_decodes is None else num_decodes, table.numpy(), lengths, queries)


def found(rows: Rows) -> tuple[list[int], int, list[int]]:
    """The rows that share, their shared tiles, and what each row skips."""
    batch = rows.batch()
    keys = SharedKeys(32, 1, 8, CPU)
    keys.find(batch.page_table_BP, batch.lengths_B, len(rows.lengths), PAGE, KEYS, IN_ORDER)
    count, tiles = keys._chosen.tolist()
    return keys._members_B[:count].tolist(), tiles, keys.skips_B[: len(rows.lengths)].tolist()


def test_the_rows_that_save_most_are_found_wherever_they_are():
    rows = Rows()
    long, short = rows.pages(24), rows.pages(5)
    rows.add(short, 22)
    rows.add(long, 100)
    rows.add([], 300)
    rows.add(short, 40)
    rows.add(long[:17], 130)
    rows.add(short, 25)
    rows.add(long, 98)
    # 24, 17 and 24 pages of 4: 4 whole tiles of 16 keys, twice saved, against 1 of the others.
    assert found(rows) == ([1, 4, 6], 4, [0, 4, 0, 0, 4, 0, 4])


@pytest.mark.parametrize(("length", "tiles"), [(17, 1), (16, 0), (33, 2), (32, 1)])
def test_the_page_that_a_step_writes_is_nobodys_to_share(length: int, tiles: int):
    rows = Rows()
    prefix = rows.pages(20)
    rows.add(prefix, 80)
    rows.add(prefix[: -(-length // PAGE)], length)
    assert found(rows)[1] == tiles


def test_padding_and_rows_of_one_page_share_nothing():
    rows = Rows()
    dump = rows.pages(1)
    for length in (0, 0, 1, 3):
        rows.add(dump, length)
    rows.add([], 50)
    members, tiles, skips = found(rows)
    assert (tiles, skips) == (0, [0] * 5)
    assert members == []


def case(seed: int, sinks: bool, group: int) -> tuple[Rows, AttentionSpec]:
    generator = torch.Generator().manual_seed(seed)
    rows = Rows()
    prefixes = [rows.pages(int(torch.randint(5, 60, (), generator=generator))) for _ in range(2)]
    for _ in range(int(torch.randint(16, 22, (), generator=generator))):
        kind = int(torch.randint(0, 5, (), generator=generator))
        own = int(torch.randint(1, 40, (), generator=generator))
        if kind == 4:
            rows.add([], own - 1)
        else:
            prefix = prefixes[kind == 0]
            rows.add(prefix, len(prefix) * PAGE + own)
    scores = (torch.randn(2 * group, generator=generator),) * 2 if sinks else ()
    return rows, AttentionSpec(2, 2 * group, 2, 24, 0.3, soft_cap=30.0 * sinks, sinks=scores)


def attention_over(rows: Rows, spec: AttentionSpec, programs: int) -> TritonAttention:
    pool = KVPool(2, rows._next, PAGE, 2, 24, torch.float32, CPU)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    attention = TritonAttention(spec, pool, GpuProcessors("few", programs, 227 << 10))
    attention._default_decode = DecodeTiles(KEYS, num_warps=4, num_stages=2, programs=1)
    attention._default_prefill = PrefillTiles(16, KEYS, num_warps=4, num_stages=2)
    return attention


def results(attention: TritonAttention, batch: AttentionBatch, q_TNH: Tensor) -> Tensor:
    attention.plan_step(batch)
    return torch.stack([attention.attend(layer, q_TNH) for layer in range(2)])


@pytest.mark.parametrize(
    ("seed", "sinks", "group", "programs"), [(0, False, 2, 2), (1, True, 3, 80), (2, False, 1, 80), (3, False, 5, 2)]
)
def test_rows_that_share_get_what_they_get_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int, sinks: bool, group: int, programs: int
):
    monkeypatch.setattr(backend_module, "LEAST_ROWS", 2)
    if seed % 2:  # a row's last part is then written first
        in_order(monkeypatch, lambda y: -1 - y)
    rows, spec = case(seed, sinks, group)
    attention, batch = attention_over(rows, spec, programs), rows.batch()
    q_TNH = torch.randn(len(rows.lengths), spec.num_heads, 24, generator=torch.Generator().manual_seed(2))
    together = results(attention, batch, q_TNH)
    assert attention._shared[0].skips_B.max() > 0
    monkeypatch.setattr(backend_module, "LEAST_ROWS", 1000)
    torch.testing.assert_close(together, results(attention, batch, q_TNH), rtol=1e-5, atol=1e-5)
    assert together.isfinite().all()
    assert not attention._arrived.any()


def test_a_replay_with_other_tables_and_lengths_finds_what_these_share(monkeypatch: pytest.MonkeyPatch):
    """One plan, and then other contents of the same tensors, as of a captured step."""
    monkeypatch.setattr(backend_module, "LEAST_ROWS", 2)
    rows, spec = case(0, False, 2)
    attention, batch = attention_over(rows, spec, 5), rows.batch()
    q_TNH = torch.randn(len(rows.lengths), spec.num_heads, 24, generator=torch.Generator().manual_seed(2))
    before = results(attention, batch, q_TNH)
    order = torch.randperm(len(rows.lengths), generator=torch.Generator().manual_seed(3))
    batch.page_table_BP.copy_(batch.page_table_BP[order].clone())
    batch.lengths_B.copy_(batch.lengths_B[order].clone())
    again = torch.stack([attention.attend(layer, q_TNH[order]) for layer in range(2)])
    torch.testing.assert_close(again, before[:, order], rtol=1e-5, atol=1e-5)
