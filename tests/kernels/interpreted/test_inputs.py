"""The decode step's inputs, against a row-by-row model of the same tables."""

import numpy as np
import pytest
import torch

from engine.graphs import inputs as torch_inputs
from engine.kernels.inputs import fill_inputs, write_tokens
from engine.layers.step import BEHIND, DecodeInputs

NUM_ROWS, MAX_LEN, DUMP = 6, 1500, 99


def tables(page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens_RM and pages_RP of random content: what lies behind a row's length must not be read as its own."""
    rng = np.random.default_rng(page_size)
    tokens = rng.integers(1, 50_000, (NUM_ROWS, MAX_LEN + 1)).astype(np.int32)
    pages = rng.integers(1, 90, (NUM_ROWS, -(-MAX_LEN // page_size))).astype(np.int32)
    return torch.from_numpy(tokens), torch.from_numpy(pages)


def room_for(num_rows: int, num_pages: int) -> DecodeInputs:
    table = torch.empty((num_rows, num_pages), dtype=torch.int32)
    columns = torch.empty((4, num_rows), dtype=torch.int64)
    return DecodeInputs(*columns, lengths_B=torch.empty(num_rows, dtype=torch.int32), page_table_BW=table)


@pytest.mark.parametrize("num_blocks", [1, 6])  # from a page to the next: 6 is three layers of a page-first pool
@pytest.mark.parametrize("page_size", [1, 16, 60])
@pytest.mark.parametrize(
    "rows", [[3], [0, 1, 2, 3, 4, 5], [5, -1, 0, -1, -1], [-1]], ids=["one", "all", "padded", "only padding"]
)
def test_three_steps(page_size, num_blocks, rows):
    stride = page_size * num_blocks
    tokens, pages = tables(page_size)
    lengths = torch.tensor([0, 1, page_size - 1, page_size, 700, MAX_LEN - 4], dtype=torch.int32)
    width = pages.shape[1] + 3  # wider than any row's own table
    inputs = room_for(len(rows), width)
    expected = lengths.tolist()
    for _ in range(3):
        inputs.page_table_BW.fill_(-5)
        own = torch.full((len(rows),), -1)
        fill_inputs(torch.tensor(rows), own, tokens, pages, lengths, page_size, DUMP, inputs, stride)
        for place, row in enumerate(rows):
            if row < 0:
                assert inputs.token_ids_B[place] == 0
                assert inputs.positions_B[place] == 0
                assert inputs.slots_B[place] == DUMP * stride
                assert inputs.write_at_B[place] == -1
                assert inputs.lengths_B[place] == 1
                assert (inputs.page_table_BW[place] == DUMP).all()
                continue
            position = expected[row]
            assert inputs.token_ids_B[place] == tokens[row, position]
            assert inputs.positions_B[place] == position
            page = int(pages[row, position // page_size])
            assert inputs.slots_B[place] == page * stride + position % page_size
            assert inputs.write_at_B[place] == row * (MAX_LEN + 1) + position + 1
            assert inputs.lengths_B[place] == position + 1
            used = position // page_size + 1
            assert torch.equal(inputs.page_table_BW[place, :used], pages[row, :used])
            assert (inputs.page_table_BW[place, used:] == 0).all()
            expected[row] += 1
        assert lengths.tolist() == expected


@pytest.mark.parametrize("fill", [fill_inputs, torch_inputs.fill_inputs], ids=["triton", "torch"])
def test_rows_that_are_verified_have_several_places_at_stated_positions(fill):
    """Their lengths on the device are out of date, in both directions; a row between them decodes by its own."""
    tokens, pages = tables(16)
    lengths = torch.tensor([40, 1, 3, 8, 700, 5], dtype=torch.int32)
    rows, given = [4, 4, 4, 1, 0, 0, -1], [15, 16, 17, -1, 60, 61, -1]
    inputs = room_for(len(rows), 5)
    fill(torch.tensor(rows), torch.tensor(given), tokens, pages, lengths, 16, DUMP, inputs)
    positions = [15, 16, 17, 1, 60, 61, 0]
    pairs = list(zip(rows, positions, strict=True))[:-1]
    assert inputs.positions_B.tolist() == positions
    assert inputs.lengths_B.tolist() == [one + 1 for one in positions]
    assert inputs.write_at_B[:-1].tolist() == [row * (MAX_LEN + 1) + at + 1 for row, at in pairs]
    assert inputs.token_ids_B[:-1].tolist() == [tokens[row, at] for row, at in pairs]
    assert inputs.page_table_BW[0].tolist() == [*pages[4, :1].tolist(), 0, 0, 0, 0]
    assert inputs.page_table_BW[1].tolist() == [*pages[4, :2].tolist(), 0, 0, 0]
    assert inputs.slots_B[2] == pages[4, 1] * 16 + 1
    assert lengths.tolist() == [62, 2, 3, 8, 18, 5]


def test_no_rows_change_nothing():
    tokens, pages = tables(16)
    lengths = torch.arange(NUM_ROWS, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    fill_inputs(none, none, tokens, pages, lengths, 16, DUMP, room_for(0, 5))
    write_tokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), tokens)
    assert lengths.tolist() == list(range(NUM_ROWS))
    assert torch.equal(tokens, tables(16)[0])


@pytest.mark.parametrize("num_tokens", [1, 256, 300])
def test_sampled_tokens_are_written_where_the_next_step_reads_them(num_tokens):
    tokens = torch.full((4, 100), 7, dtype=torch.int32)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(num_tokens))[:num_tokens]
    write_at, token_ids = order.clone(), torch.arange(num_tokens) + 1000
    token_ids[0] = -1  # a row that failed
    write_at[num_tokens // 2 + 1 :: 5] = -1  # padding
    write_tokens(write_at, token_ids, tokens)
    expected = torch.full((400,), 7, dtype=torch.int32)
    for place, token in zip(write_at.tolist(), token_ids.tolist(), strict=True):
        if place >= 0:
            expected[place] = max(token, 0)
    assert torch.equal(tokens.view(-1), expected)


@pytest.mark.parametrize("fill", [fill_inputs, torch_inputs.fill_inputs], ids=["triton", "torch"])
def test_places_behind_a_length_that_the_device_counts_leave_it_as_it_is(fill):
    tokens, pages = tables(16)
    lengths = torch.tensor([40, 1, 3, 8, 700, 5], dtype=torch.int32)
    rows, given = [4, 4, 4, 1, 0, 0, -1], [BEHIND, BEHIND + 1, BEHIND + 2, -1, BEHIND, BEHIND + 1, -1]
    inputs = room_for(len(rows), 60)
    fill(torch.tensor(rows), torch.tensor(given), tokens, pages, lengths, 16, DUMP, inputs)
    positions = [700, 701, 702, 1, 40, 41, 0]
    pairs = list(zip(rows, positions, strict=True))[:-1]
    assert inputs.positions_B.tolist() == positions
    assert inputs.lengths_B.tolist() == [one + 1 for one in positions]
    assert inputs.slots_B[:-1].tolist() == [pages[row, at // 16] * 16 + at % 16 for row, at in pairs]
    assert inputs.write_at_B[:-1].tolist() == [row * (MAX_LEN + 1) + at + 1 for row, at in pairs]
    assert inputs.token_ids_B[:-1].tolist() == [tokens[row, at] for row, at in pairs]
    assert lengths.tolist() == [40, 2, 3, 8, 700, 5]
