"""The fused kernels of layers and step inputs: next to float64, and timed beside the torch operations they replace.

Times are of the device alone: twenty calls in one graph, so that nobody waits for Python to launch.  Small numbers of
tokens lie in a cache, as in a step.  'of copy', the bytes that a kernel must read and write per second over those of a
large copy in the same run, is given for as many tokens as fill no cache; weights, which all share, do not count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from device_rates import copied_bytes_per_s
from torch import Tensor

from engine.execution.batch import lay_out
from engine.execution.rows import DeviceRows
from engine.kernels.choice import choose_kernels
from engine.kernels.float8 import GROUP, rounded
from engine.kernels.fused import FusedKernels
from engine.layers.kv_pool import KVPool
from engine.layers.linear import VocabLinear
from engine.layers.mlp import gated
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import Rotary
from engine.layers.step import DecodeInputs
from engine.messages import Step
from engine.plugins.attention.flashinfer.lists import list_pages
from gpu_sections.rows import UNCACHED_BYTES, Row, device_seconds

HIDDEN, INTERMEDIATE, VOCAB = 1024, 3072, 151_936  # those of Qwen3-0.6B
QUERIES, KEYS, HEAD_SIZE, PAGE_SIZE = 16, 8, 128, 16
EPS = 1e-6
ID_BYTES, ANGLE_BYTES = 8, 4  # int64, float32
STRIDE = 7919  # between the ids of tokens: a prime, so that they spread over the vocabulary and no row comes back soon
# Of a result around 1: some roundings in a row, and for float32 those of an angle of 500 radians, times a large head.
BOUNDS = {torch.float32: 3e-4, torch.bfloat16: 1.5e-2}
Call = Callable[[], tuple[Tensor, ...]]
NormArguments = tuple[Tensor, Tensor, float]
Make = Callable[[int, torch.dtype, "FusedKernels | None"], Call]


@dataclass(frozen=True)
class Case:
    """A kernel, or what torch does in its place.

    make: (tokens, dtype, kernels) -> a call that returns tensors to compare.
    token_values, other_bytes: what a kernel reads and writes per token in that dtype, and in others."""

    name: str
    make: Make
    token_values: float
    other_bytes: int = 0

    def token_bytes(self, dtype: torch.dtype) -> float:
        """Read and written per token."""
        return self.token_values * dtype.itemsize + self.other_bytes


def no_kernels(device: torch.device) -> list[Row]:
    """The row that says so; a failure where there is a GPU."""
    return [{"case": "(section)", "ok": device.type == "cpu", "problem": f"skipped: torch does the work on {device}"}]


def section(device: torch.device) -> Iterator[Row]:
    """A row per kernel, dtype and number of tokens."""
    kernels = choose_kernels(device)
    if kernels is None:
        yield from no_kernels(device)
        return
    copied = copied_bytes_per_s(device)
    yield {"case": "copy", "ok": True, "gb_per_s": copied / 1e9}
    for case in _cases(device):
        for dtype in BOUNDS:
            for num_tokens in (1, 64, 2048) if device.type == "cuda" else (3,):
                yield _row(case, num_tokens, dtype, kernels, device)
            uncached = round(UNCACHED_BYTES / case.token_bytes(dtype)) if device.type == "cuda" else 5
            row = _row(case, uncached, dtype, kernels, device)
            rate = uncached * case.token_bytes(dtype) / (row["us"] / 1e6)
            yield {**row, "gb_per_s": rate / 1e9, "of_copy": rate / copied}
    yield from _inputs(kernels, device)
    yield from _page_lists(kernels, device)
    yield from _rounding(kernels, device)


def _row(case: Case, num_tokens: int, dtype: torch.dtype, kernels: FusedKernels, device: torch.device) -> Row:
    found, expected = case.make(num_tokens, dtype, kernels)(), case.make(num_tokens, torch.float64, None)()
    error = max(_error(one, other) for one, other in zip(found, expected, strict=True))
    del found, expected
    ours, plain = (device_seconds(case.make(num_tokens, dtype, who), device) for who in (kernels, None))
    return {
        "case": f"{case.name}, {str(dtype).removeprefix('torch.')}, {num_tokens} tokens",
        "ok": error <= BOUNDS[dtype],
        "error": error,
        "us": ours * 1e6,
        "of_plain": plain / ours,
    }


def _cases(device: torch.device) -> list[Case]:
    """What each does, with kernels or without."""

    def numbers(*shape: int, seed: int = 0) -> Tensor:
        # Rounded once, so that every dtype starts from the same numbers.
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).bfloat16()

    def add_norm(num_tokens: int, dtype: torch.dtype, kernels: FusedKernels | None) -> Call:
        norm = RMSNorm(HIDDEN, EPS, device, dtype)
        norm.weight.copy_(numbers(HIDDEN))
        x_TD, update_TD = (numbers(num_tokens, HIDDEN, seed=seed).to(dtype) for seed in (1, 2))
        return lambda: (norm.added(x_TD, update_TD, kernels), x_TD)

    def activation(kind: str) -> Make:
        def make(num_tokens: int, dtype: torch.dtype, kernels: FusedKernels | None) -> Call:
            gate_up_T2I = numbers(num_tokens, 2 * INTERMEDIATE).to(dtype)
            return lambda: (gated(gate_up_T2I, kind, kernels),)

        return make

    def embed(num_tokens: int, dtype: torch.dtype, kernels: FusedKernels | None) -> Call:
        table = VocabLinear(VOCAB if device.type == "cuda" else 99, HIDDEN, _SecondOfTwo(), device, dtype)
        # Powers of two: rows differ, and are exact in every dtype.
        powers_V1 = torch.exp2(-(torch.arange(table.rows, device=device) % 8).float())[:, None]
        table.weight.copy_(numbers(1, HIDDEN) * powers_V1)
        token_ids_T = torch.arange(num_tokens, device=device) * STRIDE % table.vocab_size
        return lambda: (table.embed(token_ids_T, kernels),)

    def heads(num_tokens: int, dtype: torch.dtype, kernels: FusedKernels | None) -> Call:
        norm = HeadNorm(QUERIES, KEYS, HEAD_SIZE, EPS, device, dtype)
        norm.weight.copy_(numbers(QUERIES + KEYS, HEAD_SIZE))
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies_R = 1e4 ** -(torch.arange(HEAD_SIZE // 2, device=device, dtype=exact) / (HEAD_SIZE // 2))
        rotary = Rotary(frequencies_R, 1.0, dtype)
        qkv_TAH = numbers(num_tokens, QUERIES + 2 * KEYS, HEAD_SIZE, seed=1).to(dtype)
        pool = KVPool(1, -(-num_tokens // PAGE_SIZE), PAGE_SIZE, KEYS, HEAD_SIZE, dtype, device)
        slots_T = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).to(device)
        angles = rotary.angles(torch.arange(num_tokens, device=device) % 500, kernels)

        def call() -> tuple[Tensor, ...]:
            if kernels is not None:
                keys, values = pool.keys(0), pool.values(0)
                q_TQH = kernels.rotate_and_store(qkv_TAH, norm.weight, EPS, angles[0], keys, values, slots_T)
            else:
                qk_TAH = rotary.rotate(norm(qkv_TAH[:, : QUERIES + KEYS]), angles)
                pool.store(0, qk_TAH[:, QUERIES:], qkv_TAH[:, QUERIES + KEYS :], slots_T)
                q_TQH = qk_TAH[:, :QUERIES]
            return q_TQH, pool.data

        return call

    def angle_table(num_tokens: int, dtype: torch.dtype, kernels: FusedKernels | None) -> Call:
        exact = torch.float64 if dtype == torch.float64 else torch.float32  # angles are float32 in every model
        rotary = Rotary(torch.arange(1, 65, device=device, dtype=exact) / 64, 1.0, exact)
        positions_T = torch.arange(num_tokens, device=device) % 500

        def call() -> tuple[Tensor, ...]:
            angles = rotary.angles(positions_T, kernels)
            if kernels is not None:
                return angles[0].chunk(2, -1)
            return angles[0][:, 0, :64], angles[1][:, 0, 64:]

        return call

    head_values = (QUERIES + 2 * KEYS) * HEAD_SIZE
    return [
        # The stream and its update in; the stream and its norm out.
        Case("add and norm", add_norm, 4 * HIDDEN),
        # The rows of half of the ids in; all rows out, of zeros too.
        Case("embedding of one of two ranks", embed, 1.5 * HIDDEN, ID_BYTES),
        Case("angles", angle_table, 0, ID_BYTES + HEAD_SIZE * ANGLE_BYTES),
        # All heads in; queries, and keys and values in their slots, out.
        Case("head norm, rotation, store", heads, 2 * head_values, ID_BYTES + HEAD_SIZE * ANGLE_BYTES),
        *(Case(f"gated {kind}", activation(kind), 3 * INTERMEDIATE) for kind in ("silu", "gelu", "gelu_pytorch_tanh")),
    ]


class _SecondOfTwo:
    """A rank whose sums are not taken: what is timed is the gather."""

    rank, size = 1, 2

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


def _inputs(kernels: FusedKernels, device: torch.device) -> Iterator[Row]:
    """The inputs of a decode step: what ``DeviceRows`` gathers by the host's lengths, made on the device alone."""
    max_len, dump_page = 4096, 1 << 20
    for num_rows in (1, 64, 256) if device.type == "cuda" else (2,):
        rng = np.random.default_rng(num_rows)
        rows = DeviceRows(num_rows, max_len, PAGE_SIZE, device)
        rows.tokens_RM.copy_(torch.from_numpy(rng.integers(0, VOCAB, rows.tokens_RM.shape).astype(np.int32)))
        rows.pages_RP.copy_(torch.from_numpy(rng.integers(0, 1 << 20, rows.pages_RP.shape).astype(np.int32)))
        lengths = rng.integers(1, max_len, num_rows).astype(np.int32)
        rows.computed[:] = lengths
        lengths_R = torch.from_numpy(lengths).to(device)
        order = rng.permutation(num_rows)
        rows_B = torch.from_numpy(order).to(device)
        expected = rows.inputs(lay_out(Step(step_id=0, decode_rows=order.astype(np.int32).tobytes()), rows.computed))
        found = DecodeInputs(
            *torch.empty((4, num_rows), dtype=torch.int64, device=device),
            lengths_B=torch.empty(num_rows, dtype=torch.int32, device=device),
            page_table_BW=torch.empty_like(expected.page_table_BP),
        )

        own_B = torch.full_like(rows_B, -1)
        tables = rows_B, own_B, rows.tokens_RM, rows.pages_RP, lengths_R

        def fill() -> None:
            kernels.fill_inputs(*tables, PAGE_SIZE, dump_page, found)  # noqa: B023

        fill()
        # The kernel leaves out what lies past a sequence's last page.
        used_BW = torch.arange(expected.page_table_BP.shape[1], device=device) * PAGE_SIZE < expected.lengths_B[:, None]
        pairs = [
            (found.token_ids_B, expected.token_ids_T),
            (found.positions_B, expected.positions_T),
            (found.slots_B, expected.slots_T),
            (found.write_at_B, expected.write_at_N),
            (found.lengths_B, expected.lengths_B),
            (found.page_table_BW, expected.page_table_BP * used_BW),
            (lengths_R[rows_B], expected.lengths_B),
        ]
        differing = sum(int((one != other).sum()) for one, other in pairs)
        token_ids_B = torch.arange(num_rows, device=device)
        kernels.write_tokens(found.write_at_B, token_ids_B, rows.tokens_RM)
        written = rows.tokens_RM.view(-1)[expected.write_at_N]
        differing += int((written != token_ids_B).sum())
        lengths_R.zero_()  # timing goes on counting
        seconds = device_seconds(fill, device)
        yield {"case": f"step inputs, {num_rows} rows", "ok": differing == 0, "error": differing, "us": seconds * 1e6}


def _page_lists(kernels: FusedKernels, device: torch.device) -> Iterator[Row]:
    """The lists that FlashInfer reads, made from page tables on the device."""
    width = 256
    for num_rows in (1, 64, 256) if device.type == "cuda" else (3,):
        generator = torch.Generator(device).manual_seed(num_rows)
        table_BP = torch.randint(1 << 20, (num_rows, width), generator=generator, dtype=torch.int32, device=device)
        lengths_B = torch.randint(
            1, width * PAGE_SIZE, (num_rows,), generator=generator, dtype=torch.int32, device=device
        )
        made, calls = [], []
        for way in (kernels.list_pages, list_pages):
            starts_B1, last_B = table_BP.new_zeros(num_rows + 1), torch.zeros_like(lengths_B)
            pages_I1 = table_BP.new_zeros(num_rows * width + 1)
            calls.append(partial(way, table_BP, lengths_B, PAGE_SIZE, starts_B1, last_B, pages_I1))
            calls[-1]()
            made.append((starts_B1, last_B, pages_I1[: int(starts_B1[-1])]))
        differing = sum(int((one != other).sum()) for one, other in zip(*made, strict=True))
        ours, plain = (device_seconds(call, device) for call in calls)
        row = {"case": f"page lists, {num_rows} rows", "ok": differing == 0, "error": differing}
        yield {**row, "us": ours * 1e6, "of_plain": plain / ours}


def _rounding(kernels: FusedKernels, device: torch.device) -> Iterator[Row]:
    """Rows in float8, which torch rounds to the same bits; the interpreter, on a CPU, rounds otherwise.

    By themselves with both kinds of scales, and behind a norm, beside a norm and the rounding as two launches."""
    for num_rows in (1, 64, 2048) if device.type == "cuda" else (3,):
        x_TI = torch.randn((num_rows, INTERMEDIATE), device=device).bfloat16()
        update_TI, weight_I = torch.randn_like(x_TI), torch.randn(INTERMEDIATE, device=device).bfloat16()
        norm = (update_TI, weight_I, EPS)
        for group, what in ((0, "rows"), (GROUP, "groups")):

            def two_launches(x_TI: Tensor, norm: NormArguments = norm, group: int = group) -> tuple[Tensor, Tensor]:
                return kernels.round_rows(kernels.add_norm(x_TI, *norm), group)

            def one_launch(x_TI: Tensor, norm: NormArguments = norm, group: int = group) -> tuple[Tensor, Tensor]:
                return kernels.add_norm_round(x_TI, *norm, group)

            ways = {
                f"{what} in float8": (partial(kernels.round_rows, group=group), partial(rounded, group=group)),
                f"{what} in float8 behind a norm": (one_launch, two_launches),
            }
            for name, (ours, plain) in ways.items():
                found, expected = ours(x_TI.clone()), plain(x_TI.clone())
                differing = int((found[1][:num_rows] != expected[1][:num_rows]).sum())
                if device.type == "cuda":
                    bits = [one[0][:num_rows].view(torch.uint8) for one in (found, expected)]
                    differing += int((bits[0] != bits[1]).sum())
                our_s, plain_s = (device_seconds(partial(way, x_TI.clone()), device) for way in (ours, plain))
                row = {"case": f"{name}, {num_rows} rows", "ok": differing == 0, "error": differing}
                yield {**row, "us": our_s * 1e6, "of_plain": plain_s / our_s}


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest distance, relative for numbers above 1."""
    expected = expected.double()
    return float(((found.double() - expected).abs() / expected.abs().clamp(min=1.0)).max())
