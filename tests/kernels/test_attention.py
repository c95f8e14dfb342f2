"""Attention in C: next to its definition in float64, and with the same bits however a sequence was cut."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import attention
from engine.kernels.attention import CompiledAttention, compiled_attention
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.support.paging import batch_on

CPU = torch.device("cpu")
PAGE = 16
# (query heads, KV heads, head size): of every width of a vector, of none, and with more rows than an item has.
HEADS = [(4, 2, 64), (3, 3, 128), (8, 1, 80), (6, 2, 20), (5, 5, 7), (71, 1, 64), (100, 50, 8)]

pytestmark = pytest.mark.skipif(attention.compiled() is None, reason="there is no C compiler")


class Sequence:
    """Tokens of one sequence in scattered pages, every other number of the pool NaN; queries of all its positions."""

    def __init__(self, heads: tuple[int, int, int], length: int, window: int = 0) -> None:
        num_heads, num_kv_heads, size = heads
        self.length = length
        self.spec = AttentionSpec(1, num_heads, num_kv_heads, size, size**-0.5, window=window)
        num_pages = -(-length // PAGE) + 2
        self.pool = KVPool(1, num_pages, PAGE, num_kv_heads, size, torch.float32, CPU)
        self.pool.data.fill_(torch.nan)
        self.pages = torch.randperm(num_pages)[:-2].numpy().astype(np.int32)
        position = torch.arange(length)
        self.slots = torch.from_numpy(self.pages)[position // PAGE].long() * PAGE + position % PAGE
        self.keys_LGH, self.values_LGH = torch.randn((2, length, num_kv_heads, size))
        self.pool.keys(0)[self.slots], self.pool.values(0)[self.slots] = self.keys_LGH, self.values_LGH
        self.q_LNH = torch.randn((length, num_heads, size))
        found = compiled_attention(self.spec, self.pool)
        assert found is not None
        self.backend: CompiledAttention = found

    def attend(self, *parts: tuple[int, int]) -> list[Tensor]:
        """Positions first:last of each part, all in one step; decode rows first."""
        ends, counts = np.array([(last, last - first) for first, last in parts], dtype=np.int32).T
        table_BP = np.repeat(self.pages[None], len(parts), 0)
        num_decodes = int((counts == 1).cumprod().sum())
        self.backend.plan_step(batch_on(CPU, num_decodes, table_BP, ends.copy(), counts.copy()))
        queries = torch.cat([self.q_LNH[first:last] for first, last in parts])
        return list(self.backend.attend(0, queries).split(counts.tolist()))

    def expected(self) -> Tensor:
        """out_LNH, by the definition and in float64."""
        ratio = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (one.double().repeat_interleave(ratio, 1) for one in (self.keys_LGH, self.values_LGH))
        scores_NLL = torch.einsum("qnh,knh->nqk", self.q_LNH.double(), keys) * self.spec.scale
        hidden_LL = torch.ones_like(scores_NLL[0], dtype=torch.bool).triu(1)
        if self.spec.window:
            hidden_LL |= torch.ones_like(hidden_LL).tril(-self.spec.window)
        return torch.einsum("nqk,knh->qnh", scores_NLL.masked_fill(hidden_LL, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 1, 50, 130])
def test_it_is_what_attention_is(heads, window):
    sequence = Sequence(heads, 300, window)
    expected = sequence.expected()
    (found,) = sequence.attend((0, 300))
    assert (found - expected).abs().max() <= 3e-6
    for position in (0, 15, 127, 128, 129, 299):
        (found,) = sequence.attend((position, position + 1))
        assert (found - expected[position]).abs().max() <= 3e-6


def test_scores_that_are_far_apart_and_grow_are_weighed_right():
    sequence = Sequence((4, 2, 64), 400)
    sequence.q_LNH *= 60
    assert (sequence.attend((0, 400))[0] - sequence.expected()).abs().max() <= 1e-4
    along = sequence.q_LNH[-1, 0] / sequence.q_LNH[-1, 0].norm()
    sequence.keys_LGH[:, 0] = along * torch.arange(400)[:, None] / 4  # each block has a higher score than those before
    sequence.pool.keys(0)[sequence.slots] = sequence.keys_LGH
    assert (sequence.attend((399, 400))[0] - sequence.expected()[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 70])
def test_a_token_has_the_same_bits_in_any_chunk_beside_anything_by_any_threads(monkeypatch, heads, window):
    sequence = Sequence(heads, 300, window)
    (together,) = sequence.attend((0, 300))
    monkeypatch.setattr(attention, "WORTH_THREADS", 0)
    dice = np.random.default_rng(heads[0])
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for size in range(1, 101):
            starts = dice.integers(0, 300 - size, 3).tolist()
            parts = [(at, at + 1) for at in dice.integers(0, 300, 2).tolist()] + [(at, at + size) for at in starts]
            for (first, last), found in zip(parts, sequence.attend(*parts), strict=True):
                assert torch.equal(found, together[first:last]), (threads, first, last)


def test_where_pages_lie_changes_no_bit():
    sequence = Sequence((4, 2, 64), 300)
    (before,) = sequence.attend((0, 300))
    order = torch.randperm(len(sequence.pages))
    for slots in (sequence.pool.keys(0), sequence.pool.values(0)):
        pages = slots.view(-1, PAGE, 2, 64)
        pages[sequence.pages[order.argsort()]] = pages[sequence.pages].clone()
    sequence.pages = sequence.pages[order.argsort()]
    assert torch.equal(sequence.attend((0, 300))[0], before)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_other(wrong, kind):
    sequence = Sequence((4, 2, 64), 300, window=90)
    (before,) = sequence.attend((0, 300))
    getattr(sequence.pool, kind)(0)[sequence.slots[140], 1, 5] = wrong
    decode, chunk = sequence.attend((200, 201), (0, 300))
    torch.testing.assert_close(decode[0], chunk[200], rtol=0, atol=0, equal_nan=True)
    sees = torch.zeros(300, 4, dtype=torch.bool)
    sees[140:230, 2:] = True
    assert torch.equal(chunk[~sees], before[~sees])
    failed = ~chunk[sees].isfinite().all(-1)
    scores = sequence.q_LNH[..., 5][sees] * wrong
    # A key of minus infinity weighs nothing, as in the definition.
    assert torch.equal(failed, ~(scores == -torch.inf) if kind == "keys" else torch.ones_like(failed))


class Rows:
    """Three decode rows of 5, 12 and 3 tokens, in pages of 4 of a pool of 8."""

    def __init__(self) -> None:
        spec = AttentionSpec(num_layers=1, num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
        self.pool = KVPool(1, 8, 4, 2, 64, torch.float32, CPU)
        self.pool.data.normal_()
        found = compiled_attention(spec, self.pool)
        assert found is not None
        self.backend = found
        self.table = np.array([[7, 2, 0], [1, 5, 3], [6, 0, 0]], dtype=np.int32)
        self.lengths = np.array([5, 12, 3], dtype=np.int32)
        self.counts = np.ones(3, dtype=np.int32)

    def attend(self) -> Tensor:
        self.backend.plan_step(batch_on(CPU, 3, self.table, self.lengths, self.counts))
        return self.backend.attend(0, torch.randn(int(self.counts.sum()), 4, 64))


@pytest.mark.parametrize(("row", "page"), [(0, 9), (1, -1), (1, 2**31 - 1), (0, -(2**31))])
def test_a_page_beyond_the_pool_is_refused(row, page):
    rows = Rows()
    rows.table[row, 1] = page
    with pytest.raises(IndexError, match=f"row {row} .* pool's 9"):
        rows.attend()


def test_a_row_longer_than_its_pages_is_refused_but_the_dump_page_may_be_read():
    rows = Rows()
    rows.table[2, 0] = rows.pool.dump_page
    assert rows.attend().isfinite().all()
    rows.lengths[1] = 13
    with pytest.raises(IndexError, match="row 1 is longer than its 3 pages"):
        rows.attend()


def test_a_row_with_more_queries_than_tokens_is_refused():
    rows = Rows()
    rows.counts[2] = 4
    with pytest.raises(IndexError, match=r"row 2 .* has more queries than tokens"):
        rows.attend()


def test_a_block_that_weighs_nothing_spoils_no_other():
    sequence = Sequence((4, 2, 64), 300)
    sequence.q_LNH[..., 0] = sequence.q_LNH[..., 0].abs()
    sequence.keys_LGH[:140, :, 0] = -torch.inf
    sequence.pool.keys(0)[sequence.slots] = sequence.keys_LGH
    (found,) = sequence.attend((0, 300))
    assert found[:140].isnan().all()
    assert (found - sequence.expected())[140:].abs().max() <= 3e-6
