"""The lists of a batch's pages, against those that torch makes."""

import pytest
import torch

from engine.kernels.page_lists import list_pages
from engine.plugins.attention.flashinfer import lists


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_rows", [1, 7, 300])  # more rows, and more pages of a row, than are read at once
def test_lists(page_size: int, num_rows: int):
    generator = torch.Generator().manual_seed(num_rows)
    longest = 40 if num_rows == 300 else 600 * page_size
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator, dtype=torch.int32)
    lengths[:3] = torch.tensor([page_size, 1, 2 * page_size])[:num_rows]
    table = torch.randint(1, 90, (num_rows, 1 + -(-longest // page_size)), generator=generator, dtype=torch.int32)
    made = []
    for way in (list_pages, lists.list_pages):
        starts = torch.zeros(num_rows + 1, dtype=torch.int32)
        last, pages = torch.zeros(num_rows, dtype=torch.int32), torch.full((table.numel() + 1,), -9, dtype=torch.int32)
        way(table, lengths, page_size, starts, last, pages)
        made.append((starts, last, pages[: starts[-1]]))
    for mine, expected in zip(*made, strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal((made[0][0].diff() - 1) * page_size + made[0][1], lengths)
