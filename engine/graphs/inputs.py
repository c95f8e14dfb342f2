"""The inputs of a decode step in torch, for devices without this project's kernels (``engine/kernels/inputs.py``).

Legend: R rows · M longest sequence and one · P page-table width · B rows of the batch, padding included
        W pages of the batch's table
Owns: the same two operations, the choice between them, memory of inputs.  Does not know: graphs, sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.graphs.device import GraphDevice
from engine.kernels.choice import choose_kernels
from engine.layers.step import BEHIND, DecodeInputs


@dataclass(frozen=True, slots=True)
class InputOps:
    """Operations on a decode step's inputs: ``fill_inputs`` and ``write_tokens`` of ``engine/kernels/inputs.py``."""

    fill: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, DecodeInputs, int], None]
    write: Callable[[Tensor, Tensor, Tensor], None]


def choose_inputs(device: torch.device) -> InputOps:
    """Return the fastest operations that the device has."""
    kernels = choose_kernels(device)
    if kernels is None:
        return InputOps(fill_inputs, write_tokens)
    return InputOps(kernels.fill_inputs, kernels.write_tokens)


def static_inputs(device: GraphDevice, num_rows: int, num_pages: int) -> DecodeInputs:
    """Return inputs at fixed addresses.  num_pages: of each row's table."""
    token_ids_B, positions_B, slots_B, write_at_B = device.buffer((4, num_rows), torch.int64)
    lengths_B = device.buffer((num_rows,), torch.int32)
    table_BW = device.buffer((num_rows, num_pages), torch.int32)
    return DecodeInputs(token_ids_B, positions_B, slots_B, write_at_B, lengths_B, table_BW)


def first_rows(inputs: DecodeInputs, num_rows: int) -> DecodeInputs:
    """Return the inputs of the first rows, in the same memory."""
    return DecodeInputs(*(getattr(inputs, field.name)[:num_rows] for field in fields(inputs)))


def fill_inputs(
    rows_B: Tensor,
    given_B: Tensor,
    tokens_RM: Tensor,
    pages_RP: Tensor,
    lengths_R: Tensor,
    page_size: int,
    dump_page: int,
    inputs: DecodeInputs,
    page_stride: int = 0,
) -> None:
    """Write ``inputs`` for one more token of each row, and the rows' new lengths.  A negative row is padding.

    given_B: positions; -1 where a row's length is the one, or ``BEHIND`` and a distance.  The places of a row are
    adjacent.
    page_stride: of the pool; 0 for page_size."""
    real_B, row_B = rows_B >= 0, rows_B.clamp(min=0)
    length_B = lengths_R.index_select(0, row_B)
    from_length_B = length_B + torch.where(given_B < -1, given_B - BEHIND, 0)
    position_B = torch.where(real_B, torch.where(given_B < 0, from_length_B, given_B), 0)
    page_at_B = row_B * pages_RP.shape[1] + position_B // page_size
    page_B = torch.where(real_B, pages_RP.view(-1).index_select(0, page_at_B), dump_page)
    token_at_B = row_B * tokens_RM.shape[1] + position_B
    inputs.token_ids_B.copy_(torch.where(real_B, tokens_RM.view(-1).index_select(0, token_at_B), 0))
    inputs.positions_B.copy_(position_B)
    inputs.slots_B.copy_(page_B.to(torch.int64) * (page_stride or page_size) + position_B % page_size)
    inputs.write_at_B.copy_(torch.where(real_B, token_at_B + 1, -1))
    inputs.lengths_B.copy_(position_B + 1)
    is_last_B = torch.cat((rows_B[1:] != rows_B[:-1], real_B[-1:])) & real_B & (given_B >= -1)
    lengths_R.index_add_(0, row_B, torch.where(is_last_B, position_B + 1 - length_B, 0).to(torch.int32))
    table_BW = inputs.page_table_BW
    column_W = torch.arange(table_BW.shape[1], device=table_BW.device)
    own_BW = pages_RP[:, : table_BW.shape[1]].index_select(0, row_B)
    inside_BW = column_W <= (position_B // page_size)[:, None]
    table_BW.copy_(torch.where(real_B[:, None], own_BW.masked_fill(~inside_BW, 0), dump_page))


def write_tokens(write_at_N: Tensor, token_ids_N: Tensor, tokens_RM: Tensor) -> None:
    """Write each token id, or 0 if it is negative, to tokens_RM.view(-1)[write_at], unless that is negative."""
    flat, at_N = tokens_RM.view(-1), write_at_N.clamp(min=0)
    # A negative place rewrites the first token of the first row as it is: no sampled token ever goes there.
    new_N = torch.where(write_at_N < 0, flat[:1], token_ids_N.clamp(min=0).to(flat.dtype))
    flat.index_copy_(0, at_N, new_N)
