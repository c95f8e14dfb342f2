"""The sum over ranks of a layer's result, its residual add and the norm behind it, in one launch on every rank.

Legend: T tokens · D model dim · R ranks · S slots of one rank's memory, one per token
Owns: the layout of the memory that ranks read of each other, the order in which they write and read it, one pass over
the rows.  Does not know: how memory is shared, which layer is normalised.

A rank's memory has a counter for each slot and rank, and then each slot's part twice, for uses with even and with odd
numbers.  A program copies its rank's part into its slot, sets its own counter in every rank's memory to the number of
the use, and waits for the other ranks' counters.  A rank that writes a slot's half again has seen all ranks begin the
use between, so all have read what it overwrites.  Counters only rise, and each rank's number of uses is in its own
memory, so that a captured launch may be replayed any number of times.  Every rank adds the parts in the order of ranks,
in float32, so all have the same bits.

A program waits for the program of its number on other ranks.  Programs begin in the order of their numbers, so the
first ones that have not ended are there on all ranks.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.kernels.norm import normed_sum

SLOTS: Final = 64
SLOT_BYTES: Final = 1 << 15
COUNTER_BYTES: Final = 8


class RanksMemory(NamedTuple):
    """Memory of all ranks, as one rank sees it.

    addresses_R: of each rank's memory, int64, on the device.  uses_S: int64, this rank's uses of each slot."""

    rank: int
    addresses_R: Tensor
    uses_S: Tensor


def memory_bytes(num_ranks: int) -> int:
    """Return the size of one rank's memory, which is all zeros before its first use."""
    return SLOTS * (num_ranks * COUNTER_BYTES + 2 * SLOT_BYTES)


def fits(part_TD: Tensor) -> bool:
    """Return whether slots hold a rank's part."""
    num_tokens, width = part_TD.shape
    return 0 < num_tokens <= SLOTS and width * part_TD.element_size() <= SLOT_BYTES and part_TD.is_contiguous()


def sum_add_norm(memory: RanksMemory, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Add the sum of all ranks' parts to x in place and return the norm of that, as ``norm.add_norm`` does.

    All ranks call it with the same shapes.  The sum is rounded to x's dtype before it is added, once."""
    num_tokens, width = x_TD.shape
    assert fits(part_TD), f"a part of shape {tuple(part_TD.shape)} does not fit the slots"
    assert x_TD.is_contiguous(), "the residual stream is written in place"
    y_TD = torch.empty_like(x_TD)
    block = triton.next_power_of_2(width)
    sum_norm_rows[(num_tokens,)](
        x_TD, part_TD, weight_D, y_TD, memory.addresses_R, memory.uses_S, eps,
        RANK=memory.rank, RANKS=len(memory.addresses_R), SLOTS=SLOTS, SLOT_BYTES=SLOT_BYTES,
        WIDTH=width, BLOCK_D=block,
        num_warps=min(16, max(1, block // 256)), enable_fp_fusion=True, **launch_options(x_TD.device),
    )  # fmt: skip
    return y_TD


@triton.jit
def slot_of(address, slot, use, element: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, BYTES: tl.constexpr):
    """Return where the part of a slot is in the memory at an address."""
    place = (slot + (use % 2) * SLOTS) * BYTES + SLOTS * RANKS * 8
    # Of a loaded address the compiler assumes nothing, and would then read one number at a time.
    return tl.multiple_of((address + place).to(tl.pointer_type(element)), 16)


@triton.jit
def sum_norm_rows(
    x, part, weight, out, addresses, uses, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Process one row per program."""
    slot = tl.program_id(0).to(tl.int64)
    at = slot * WIDTH
    d_D = tl.arange(0, BLOCK_D)
    live_D = d_D < WIDTH
    element: tl.constexpr = x.dtype.element_ty
    weight_D = tl.load(weight + d_D, mask=live_D, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    let_next_begin(PDL)
    use = tl.load(uses + slot)
    mine = slot_of(tl.load(addresses + RANK), slot, use, element, RANKS, SLOTS, SLOT_BYTES)
    tl.store(mine + d_D, tl.load(part + at + d_D, mask=live_D, other=0.0), mask=live_D)
    tl.debug_barrier()  # all of the row is written before a counter says so
    for rank in tl.static_range(RANKS):
        counter = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + slot * RANKS + RANK
        tl.atomic_xchg(counter, use + 1, sem="release", scope="sys")
    counters = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + slot * RANKS
    for rank in tl.static_range(RANKS):
        while tl.atomic_add(counters + rank, 0, sem="acquire", scope="sys") <= use:
            pass
    tl.debug_barrier()
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for rank in tl.static_range(RANKS):
        theirs = slot_of(tl.load(addresses + rank), slot, use, element, RANKS, SLOTS, SLOT_BYTES)
        sum_D += tl.load(theirs + d_D, mask=live_D, other=0.0).to(tl.float32)
    norm_D = normed_sum(x + at, sum_D.to(element).to(tl.float32), weight_D, d_D, live_D, eps, WIDTH)
    tl.store(out + at + d_D, norm_D.to(element), mask=live_D)
    tl.store(uses + slot, use + 1)
