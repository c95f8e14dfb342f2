"""Compiles every kernel of ``engine/kernels`` for an H200 (sm_90a) on a machine without a GPU, by its own launches.

    python -m tests.kernels.compile_kernels

Prints one line of JSON per variant: its registers, bytes of stack, those of spilled registers, shared memory.  What the
interpreter cannot see shows here: types that do not match, operations that the hardware has no instruction for.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.jit import JITFunction

from engine.checkpoints.shape import RouterShape
from engine.kernels import dependent_launch
from engine.kernels.activation import KINDS, gated
from engine.kernels.adapters import add_adapters, output_tiles
from engine.kernels.embedding import embed_shard
from engine.kernels.experts import mix_experts
from engine.kernels.few_rows import MOST_ROWS, multiply_few, multiply_few_blocks
from engine.kernels.fixed_products import fixed_product
from engine.kernels.float8 import GROUP
from engine.kernels.four_bit_products import TILE_ROWS, Codes, multiply_four_bits, widened
from engine.kernels.heads import rotate_and_store
from engine.kernels.inputs import fill_inputs, write_tokens
from engine.kernels.norm import add_norm
from engine.kernels.page_lists import list_pages
from engine.kernels.recurrences import TritonRecurrences
from engine.kernels.rotary import angle_table
from engine.kernels.rounding import add_norm_round, gated_round, round_rows
from engine.kernels.routing import choose_experts
from engine.kernels.summed_norm import SLOTS, RanksMemory, sum_add_norm
from engine.layers.float8_experts import StoredFloat8
from engine.layers.four_bits import StoredCodes
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.step import DecodeInputs
from engine.sampling.state import Newcomer, SamplingState
from engine.sampling.triton.sampler import KernelSampler
from engine.types.params import SamplingParams
from tests.no_gpu import NoGPU, order, resources

CPU = torch.device("cpu")
VOCAB = 151_936


def layers(dtype: torch.dtype) -> None:
    """Launch the kernels of a decoder with sizes of Qwen3-0.6B, and some that are no powers of two."""
    for width in (1024, 5120, 100):
        x_TD = torch.zeros((2, width), dtype=dtype)
        add_norm(x_TD, x_TD.clone(), torch.ones(width, dtype=dtype), 1e-6)
        add_norm(x_TD, torch.zeros((2, 8, width), dtype=dtype), torch.ones(width, dtype=dtype), 1e-6)
        for group in (0, 128) if width % 128 == 0 else (0,):
            round_rows(x_TD, group)
            add_norm_round(x_TD, x_TD.clone(), torch.ones(width, dtype=dtype), 1e-6, group)
    for width, size in ((4096, 8), (8192, 4), (8192, 8)):
        x_TD = torch.zeros((2, width), dtype=dtype)
        memory = RanksMemory(size - 1, torch.zeros(size, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64))
        sum_add_norm(memory, x_TD, x_TD.clone(), torch.ones(width, dtype=dtype), 1e-6)
    for kind in KINDS:
        gated(torch.zeros((2, 2 * 3072), dtype=dtype), kind)
        for group, width in ((0, 3072), (0, 14_336), (128, 3072), (128, 14_336)):
            gated_round(torch.zeros((2, 2 * width), dtype=dtype), kind, group)
    embed_shard(torch.zeros(2, dtype=torch.int64), torch.zeros((8, 1024), dtype=dtype), 0)
    # More tokens than the second axis of a grid takes.
    gated(torch.zeros((1 << 16, 2), dtype=dtype))
    embed_shard(torch.zeros(1 << 16, dtype=torch.int64), torch.zeros((8, 16), dtype=dtype), 0)
    positions_T = torch.zeros(2, dtype=torch.int64)
    for num_heads, num_keys, head_size, normalised in ((32, 8, 128, True), (32, 8, 80, False)):
        angles_TH = angle_table(positions_T, torch.zeros(head_size // 2), 1.0)
        qkv_TAH = torch.zeros((2, num_heads, head_size), dtype=dtype)
        slots_SGH = torch.zeros((32, num_keys, head_size), dtype=dtype)
        weight = torch.ones((num_heads - num_keys, head_size), dtype=dtype) if normalised else None
        rotate_and_store(qkv_TAH, weight, 1e-6, angles_TH, slots_SGH, slots_SGH.clone(), positions_T)
        bytes_SGH = slots_SGH.to(torch.float8_e4m3fn)
        rotate_and_store(qkv_TAH, weight, 1e-6, angles_TH, bytes_SGH, bytes_SGH.clone(), positions_T, 448.0)


def experts(dtype: torch.dtype) -> None:
    """A batch of decodes and a prompt: sizes of Qwen3-30B-A3B, and of gpt-oss-20b, which has biases."""
    groups = RouterShape(scoring="sigmoid", corrected=True, num_groups=8, num_chosen_groups=4)
    for num_experts, num_chosen, shape in ((128, 8, RouterShape()), (32, 4, RouterShape()), (256, 8, groups)):
        scores_TE = torch.empty((8, num_experts), dtype=dtype, device="meta")
        correction_E = scores_TE[0].float() if shape.corrected else None
        choose_experts(scores_TE, correction_E, num_chosen, shape, dtype)
    for num_experts, num_chosen, width, inner, biased in ((128, 8, 2048, 768, False), (32, 4, 2880, 2880, True)):
        gate_up = torch.empty((num_experts, 2 * inner, width), dtype=dtype, device="meta")
        down = torch.empty((num_experts, width, inner), dtype=dtype, device="meta")
        biases = gate_up[..., 0].contiguous(), down[..., 0].contiguous()
        for num_tokens in (8, 1024, 4096):
            x_TD = torch.empty((num_tokens, width), dtype=dtype, device="meta")
            weights_TK = torch.empty((num_tokens, num_chosen), dtype=dtype, device="meta")
            chosen_TK = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device="meta")
            kind = "clamped_swish" if biased else "silu"
            mix_experts(x_TD, weights_TK, chosen_TK, gate_up, down, *(biases if biased else (None, None)), kind)
            if not biased and dtype == torch.bfloat16:
                blocks = [StoredFloat8(*one.shape, torch.device("meta")).arranged() for one in (gate_up, down)]
                mix_experts(x_TD, weights_TK, chosen_TK, *blocks, None, None, kind)
            if biased and dtype == torch.bfloat16:
                codes = [StoredCodes(*one.shape, torch.device("meta")).arranged() for one in (gate_up, down)]
                mix_experts(x_TD, weights_TK, chosen_TK, *codes, *biases, kind)


def adapters(dtype: torch.dtype) -> None:
    """The products of adapters of Qwen3-8B, of a batch of decodes and a prompt, and one that fills no tile."""
    meta = torch.device("meta")
    for inputs, outputs, rank, num_slots in (
        (4096, [4096, 1024, 1024], 16, 8),
        (12_288, [4096], 64, 8),
        (80, [37], 5, 1),
    ):
        a_SPRI = torch.empty((num_slots, len(outputs), rank, inputs), dtype=dtype, device=meta)
        b_SRO = torch.empty((num_slots, rank, sum(outputs)), dtype=dtype, device=meta)
        for num_rows in (1, 200, 2048):
            x_TI = torch.empty((num_rows, inputs), dtype=dtype, device=meta)
            slots_T = torch.zeros(num_rows, dtype=torch.int64, device=meta)
            y_TO = x_TI.new_empty((num_rows, sum(outputs)))
            add_adapters(y_TO, x_TI, slots_T, a_SPRI, b_SRO, output_tiles(outputs, meta))


def products(dtype: torch.dtype) -> None:
    """One shape, with every number of rows, that is one variant, and another of int8; and one that fills no tile."""
    for outputs, inputs, biased in ((3072, 1024, True), (37, 80, False)):
        weight_OI = torch.empty((outputs, inputs), dtype=dtype, device="meta")
        for num_rows in (1, 8, 16, 100, 4096):
            x_TI = torch.empty((num_rows, inputs), dtype=dtype, device="meta")
            fixed_product(x_TI, weight_OI, weight_OI[:, 0].contiguous() if biased else None)
            if biased and dtype == torch.bfloat16:
                fixed_product(x_TI, weight_OI.to(torch.int8), None, weight_OI[:, 0].contiguous())
    # Several tiles of inputs, one that is not filled, and one of a small weight.
    for outputs, inputs in ((5120, 17_408), (1024, 3072), (37, 80)):
        weight_OI = torch.empty((outputs, inputs), dtype=dtype, device="meta")
        for num_rows in (1, MOST_ROWS):
            x_TI = torch.empty((num_rows, inputs), dtype=dtype, device="meta")
            multiply_few(x_TI, weight_OI, weight_OI[:, 0].contiguous())
            if dtype == torch.bfloat16:
                multiply_few(x_TI, weight_OI.to(torch.int8), None, weight_OI[:, 0].contiguous())
            if dtype == torch.bfloat16 and inputs % GROUP == 0:
                scales_GT = torch.empty((inputs // GROUP, 4), device="meta")
                scales_BL = torch.empty((outputs // GROUP, inputs // GROUP), device="meta")
                rows_TI = torch.empty((4, inputs), dtype=torch.float8_e4m3fn, device="meta")
                blocks_OI = weight_OI.to(torch.float8_e4m3fn)
                multiply_few_blocks(rows_TI, scales_GT.t(), blocks_OI, scales_BL.t(), num_rows, dtype)


def four_bits(dtype: torch.dtype) -> None:
    """Weights in 4 bits whose inputs are shared by programs, and not, with each size of group and of tile."""
    if dtype == torch.float32:
        return
    meta = torch.device("meta")
    for group, outputs, inputs in ((32, 37, 96), (64, 1024, 4096), (128, 1024, 4096), (128, 65_536, 4096)):
        piece = max(64, group)
        codes = Codes(
            torch.empty((-(-inputs // piece), outputs, piece // 2), dtype=torch.uint8, device=meta),
            torch.empty((inputs // group, outputs), dtype=torch.float16, device=meta),
            torch.empty((inputs // group, outputs), dtype=torch.uint8, device=meta),
            torch.empty(-(-outputs // TILE_ROWS), dtype=torch.int32, device=meta),
            inputs,
        )
        for num_rows in (1, 32, 64):
            x_TI = torch.empty((num_rows, inputs), dtype=dtype, device=meta)
            multiply_four_bits(x_TI, codes, x_TI.new_empty(outputs))
        widened(codes, dtype)


def recurrences(dtype: torch.dtype) -> None:
    """A batch of decodes, and prompts beside decodes: Qwen3-Next, Kimi-Linear, with a decay for each number of a
    key, Granite 4 H tiny, and keys of 256, as Falcon-H1's."""
    ours = TritonRecurrences()
    for heads, groups, key, value, delta in (
        (32, 16, 128, 128, True),
        (32, 32, 128, 128, True),
        (48, 1, 128, 64, False),
        (24, 1, 256, 64, False),
    ):
        inner, channels = heads * value, heads * value + 2 * groups * key
        states = RecurrentStates([[(3, channels), (heads, key, value)]], 2, CPU)
        windows, matrices = states.layers[0]
        per_head = torch.zeros(heads)
        for counts in ([1, 1], [1, 70]):
            lengths = np.array(counts, dtype=np.int32)
            step = StatesOfStep(states, np.arange(2), lengths + 1, lengths)
            decays = heads * key if delta and heads == groups else heads
            product = torch.zeros((int(lengths.sum()), channels + inner + decays + heads), dtype=dtype)
            x_TC, z_TI, a_TA, b_TH = product.split([channels, inner, decays, heads], -1)
            y_TC = ours.convolve(x_TC, torch.zeros(4, channels), product[0, :channels], windows, step, True)
            if delta:
                o_THV = ours.delta(y_TC, a_TA, b_TH, per_head, torch.zeros(decays), 1.0, matrices, step)
            else:
                o_THV = ours.ssd(y_TC, a_TA, per_head, per_head, per_head, 0.0, matrices, step)
            norm, num_groups = (torch.ones(value), heads) if delta else (torch.ones(inner), groups)
            ours.gate(o_THV.flatten(1), z_TI, norm, num_groups, 1e-6, not delta)


def inputs(dtype: torch.dtype) -> None:
    """Launch the kernels that prepare a decode step."""
    rows_B = torch.zeros(2, dtype=torch.int64)
    table = torch.zeros((4, 100), dtype=torch.int32)
    filled = DecodeInputs(*torch.zeros((4, 2), dtype=torch.int64), table[:2, 0], torch.zeros((2, 5), dtype=torch.int32))
    fill_inputs(rows_B, rows_B, table, table, torch.zeros(4, dtype=torch.int32), 16, 9, filled)
    write_tokens(rows_B, rows_B, table)
    ints = torch.zeros(8, dtype=torch.int32)
    list_pages(table, ints[:4], 16, ints[:5], ints[:4], table.flatten())


def sampling(dtype: torch.dtype) -> None:
    """Greedy, by temperature, with cuts, and adjusted."""
    logits_NV = torch.zeros((3, VOCAB), dtype=dtype)
    for wishes in (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=20, top_p=0.9),
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=1, logit_bias={1: 2.0}, frequency_penalty=0.5),
    ):
        for max_len in (1000, 40_000):
            state = SamplingState(3, VOCAB, max_len, CPU)
            for row in range(3):
                state.admit((Newcomer(row, wishes, np.array([1], np.int32), 1),), (0,))
            sampler = KernelSampler(state)
            plan = sampler.plan(np.arange(3), np.zeros(3, np.bool_))
            sampler.pick(plan, logits_NV, None if wishes.greedy else torch.ones(3, dtype=torch.int64))


def compile_launches(work: Callable[[], None]) -> list[tuple[Any, float]]:
    """The variants that ``work`` launches, each once, and the seconds it took; nothing is run."""
    found: dict[int, tuple[Any, float]] = {}
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(0 < size < (1 << 31, 1 << 16, 1 << 16)[axis] for axis, size in enumerate(grid)), f"grid {grid}"
        start = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault(id(kernel), (kernel, time.perf_counter() - start))

    JITFunction.run = warm_up
    try:
        work()
    finally:
        JITFunction.run = run
    return list(found.values())


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoGPU())
    dependent_launch.has_dependent_launch = lambda device: True
    for dtype_name in sys.argv[1:] or ["bfloat16", "float32"]:
        for group in (layers, experts, adapters, products, four_bits, recurrences, inputs, sampling):
            one_dtype = getattr(torch, dtype_name)
            for kernel, seconds in compile_launches(lambda group=group, dtype=one_dtype: group(dtype)):
                about = {"kernel": kernel.metadata.name, "dtype": dtype_name, "s": round(seconds, 2)}
                row = {**about, **resources(kernel), **order(kernel), "float8": kernel.asm["ptx"].count("e4m3.e4m3")}
                print(json.dumps(row), flush=True)
