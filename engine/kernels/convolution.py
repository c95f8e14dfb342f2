"""The causal convolution of recurrent layers: one launch, which also keeps each row's last inputs.

Legend: T new tokens of a step · C channels · K taps · S slots · B rows of the step · N inputs that a row keeps
Owns: the sum over taps, the order of what is read and kept.  Does not know: layers.

A sum adds the same products in the same order wherever a prompt is cut.  The first tile of a row reads what the row had
kept, and writes what it keeps next; no other program does either.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from engine.layers.states import StatesOfStep

DECODED: Final = (1, 256)  # tokens and channels of a tile in a step of decodes
TILE: Final = (64, 64)  # in a step with prompts


def convolve(
    x_TC: Tensor, weight_KC: Tensor, bias_C: Tensor | None, windows_SNC: Tensor, step: StatesOfStep, silu: bool
) -> Tensor:
    """Return y_TC, or silu(y), in float32, and keep each row's last inputs in its float32 window.

    weight_KC: float32, contiguous."""
    (num_tokens, width), (taps, _) = x_TC.shape, weight_KC.shape
    assert x_TC.stride(1) == 1, "channels of a token are contiguous"
    assert weight_KC.is_contiguous(), "weights of a tap are contiguous"
    assert taps <= TILE[0] + 1, "only the first tile of a row reads what the row had kept"
    y_TC = x_TC.new_empty((num_tokens, width), dtype=torch.float32)
    tokens, channels = DECODED if step.longest == 1 else TILE
    tiles, blocks = triton.cdiv(step.longest, tokens), triton.cdiv(width, channels)
    if num_tokens:
        convolve_tile[(step.num_rows * tiles * blocks,)](
            x_TC, weight_KC, bias_C, windows_SNC, step.slots_B, step.fresh_B, step.starts_B1, y_TC, x_TC.stride(0),
            windows_SNC.stride(0), tiles,
            WIDTH=width, TAPS=taps, BIASED=bias_C is not None, SILU=silu, BLOCKS=blocks, BLOCK_T=tokens,
            BLOCK_C=channels, num_warps=2 if tokens == 1 else 4, enable_fp_fusion=True, **launch_options(x_TC.device),
        )  # fmt: skip
    return y_TC


# Lists of a step lie at changing places, and the number of tiles changes: neither may make another variant.
@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["slots", "fresh", "starts"])
def convolve_tile(
    x, weight, bias, windows, slots, fresh, starts, out, x_stride, slot_stride, tiles,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some channels of some tokens of one row per program."""
    program = tl.program_id(0)
    c_C = (program % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    row, tile = program // BLOCKS // tiles, program // BLOCKS % tiles
    live_C = c_C < WIDTH
    wait_for_previous(PDL)
    let_next_begin(PDL)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    if tile * BLOCK_T < count:
        had = tl.load(fresh + row) == 0  # without, what the slot holds is another row's
        window = windows + tl.load(slots + row).to(tl.int64) * slot_stride
        own = x + first.to(tl.int64) * x_stride
        t_T = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        live_TC = (t_T < count)[:, None] & live_C[None, :]
        sum_TC = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for tap in tl.static_range(TAPS):
            t_T1 = (t_T + (tap - TAPS + 1))[:, None]
            input_TC = inputs(own, window, t_T1, c_C[None, :], live_TC, had, x_stride, WIDTH, TAPS)
            weight_C = tl.load(weight + tap * WIDTH + c_C, mask=live_C, other=0.0)
            sum_TC += input_TC * weight_C[None, :]
        if BIASED:
            sum_TC += tl.load(bias + c_C, mask=live_C, other=0.0).to(tl.float32)[None, :]
        if SILU:
            sum_TC *= tl.sigmoid(sum_TC)
        out_TC = out + (first + t_T).to(tl.int64)[:, None] * WIDTH + c_C[None, :]
        tl.store(out_TC, sum_TC, mask=live_TC)
        if tile == 0:
            n_N1 = tl.arange(0, triton.next_power_of_2(TAPS - 1))[:, None]
            live_NC = (n_N1 < TAPS - 1) & live_C[None, :]
            t_N1 = count + n_N1 - (TAPS - 1)
            kept_NC = inputs(own, window, t_N1, c_C[None, :], live_NC, had, x_stride, WIDTH, TAPS)
            # Every thread has read what the row had before one of them writes.
            tl.debug_barrier()
            tl.store(window + n_N1 * WIDTH + c_C[None, :], kept_NC, mask=live_NC)


@triton.jit
def inputs(x, window, t_N1, c_1C, live_NC, had, x_stride, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """Return inputs of a row by their distance from its first new token, those before it from what it has kept."""
    new_NC, old_NC = live_NC & (t_N1 >= 0), live_NC & (t_N1 < 0) & had
    new = tl.load(x + t_N1.to(tl.int64) * x_stride + c_1C, mask=new_NC, other=0.0).to(tl.float32)
    return new + tl.load(window + (t_N1 + TAPS - 1) * WIDTH + c_1C, mask=old_NC, other=0.0)
