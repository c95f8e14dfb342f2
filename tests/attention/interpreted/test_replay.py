"""A decode step as a CUDA graph has it: launched over tensors that stay where they are, while what they hold changes.

A graph replays launches with the arguments of the capture.  Here the same is done by calling ``attend`` again without
``plan_step``: nothing of the host's but the shapes of the tensors may matter.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.proof.reference import attend
from tests.attention.batches import batch_of

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, MAX_PAGES, ROWS = 8, 30, 12, 4
SPEC = AttentionSpec(2, 4, 2, 16, 0.3, window=20, first_window_layer=1)


class Growing:
    """Rows that grow as decode rows do, over shuffled pages of a pool in which everything else is NaN."""

    def __init__(self) -> None:
        self.pool = KVPool(2, NUM_PAGES, PAGE_SIZE, 2, 16, torch.float32, CPU)
        self.pool.data[:, :, :NUM_PAGES].fill_(torch.nan)
        self.generator = torch.Generator().manual_seed(0)
        self.free = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist()
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def grow(self, row: int, count: int) -> None:
        first = self.lengths.get(row, 0)
        for position in range(first, first + count):
            pages = self.pages.setdefault(row, [])
            if position // PAGE_SIZE == len(pages):
                pages.append(self.free.pop())
            slot = pages[-1] * PAGE_SIZE + position % PAGE_SIZE
            for layer in range(2):
                self.pool.keys(layer)[slot] = torch.randn(2, 16, generator=self.generator)
                self.pool.values(layer)[slot] = torch.randn(2, 16, generator=self.generator)
        self.lengths[row] = first + count

    def write_to(self, batch: AttentionBatch, rows: list[int], padding_length: int) -> None:
        """The step of these rows; places behind them are padding on the dump page."""
        batch.page_table_BP.fill_(self.pool.dump_page)
        batch.lengths_B.fill_(padding_length)
        for place, row in enumerate(rows):
            batch.page_table_BP[place].zero_()
            batch.page_table_BP[place, : len(self.pages[row])] = torch.tensor(self.pages[row])
            batch.lengths_B[place] = self.lengths[row]

    def check(self, layer: int, rows: list[int], q_TNH: Tensor, out_TNH: Tensor) -> None:
        for place, row in enumerate(rows):
            position_L = torch.arange(self.lengths[row])
            slots_L = torch.tensor(self.pages[row])[position_L // PAGE_SIZE] * PAGE_SIZE + position_L % PAGE_SIZE
            keys, values = self.pool.keys(layer)[slots_L], self.pool.values(layer)[slots_L]
            expected = attend(q_TNH[place][None], keys, values, SPEC.scale, SPEC.window if layer else 0)
            torch.testing.assert_close(out_TNH[place][None].double(), expected, rtol=1e-5, atol=1e-5)
        assert out_TNH.isfinite().all()


STEPS = [([0], 1), ([0, 1, 2], 30), ([2, 0], 9), ([3], 60), ([3, 1, 0, 2], 1)]


@pytest.mark.parametrize("padding_length", [0, 1], ids=["no length", "one token of the dump page"])
def test_one_capture_serves_every_step(padding_length: int) -> None:
    growing = Growing()
    batch = batch_of(ROWS, width=MAX_PAGES, device=CPU)
    attention = TritonAttention(SPEC, growing.pool)
    attention.plan_step(batch)
    for rows, count in STEPS:
        for row in rows:
            growing.grow(row, count)
        growing.write_to(batch, rows, padding_length)
        q_TNH = torch.randn(ROWS, 4, 16, generator=growing.generator)
        for layer in range(2):
            growing.check(layer, rows, q_TNH, attention.attend(layer, q_TNH))
