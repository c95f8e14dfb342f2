"""The sampler's kernels: the tokens of torch's sampler on the CPU, and timed beside torch's sampler on the device."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.choice import choose_kernels
from engine.sampling.captured import array_columns, columns_bytes, tensor_columns
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.settings.own_kernels import VARIABLE
from engine.types.params import SamplingParams
from gpu_sections.kernels import no_kernels
from gpu_sections.rows import Row, device_seconds, seconds_of

CPU = torch.device("cpu")
POSITION = 50
ALONE = "top_p 0.95 alone"
WISHES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    ALONE: SamplingParams(top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, logit_bias={7: 1.0}),
}


# Logits times this: those of random weights, where the tokens that make up top_p are most of the vocabulary.
FLATTER = 0.01


def section(device: torch.device, vocab_size: int = 151_936, batches: Sequence[int] = (1, 64, 256)) -> Iterator[Row]:
    """A row per kind of request and batch size; the same bfloat16 logits for all.

    A draw may differ where its number falls on the border between two tokens, as a GPU's exp rounds otherwise.
    """
    if choose_kernels(device) is None:
        yield from no_kernels(device)
        return
    for num_rows in batches:
        peaked_NV = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0)).mul_(3).bfloat16()
        cases = [(name, wishes, peaked_NV) for name, wishes in WISHES.items()]
        cases.append((f"{ALONE}, flat logits", WISHES[ALONE], peaked_NV * FLATTER))
        for name, wishes, logits_NV in cases:
            ours_NV = logits_NV.to(device)
            case = f"{name}, {num_rows} rows"
            with_kernels, with_torch, expected = (
                _sampler([wishes], num_rows, vocab_size, where, who)
                for where, who in ((device, "triton"), (device, "torch"), (CPU, "torch"))
            )
            differing = int((_sample(with_kernels, ours_NV).cpu() != _sample(expected, logits_NV)).sum())
            seconds, plain = (
                seconds_of(lambda one=one, ours_NV=ours_NV: _sample(one, ours_NV), device)
                for one in (with_kernels, with_torch)
            )
            # Of flat logits a token's share is less than what rounding moves the borders by: those are timed alone.
            allowed = num_rows if logits_NV is not peaked_NV else 0 if wishes.greedy else num_rows // 64
            row = {"case": case, "ok": differing <= allowed, "error": differing, "us": seconds * 1e6}
            yield {**row, "of_plain": plain / seconds}
        ours_NV = peaked_NV.to(device)
        yield _captured("all kinds", list(WISHES.values()), ours_NV, device)
        # What the one row asks for, the whole batch pays for.
        one_of_many = [WISHES[ALONE], *[WISHES["temperature"]] * (num_rows - 1)]
        yield _captured(f"one row of {ALONE}", one_of_many, ours_NV, device)


def _captured(case: str, kinds: Sequence[SamplingParams], logits_NV: Tensor, device: torch.device) -> Row:
    """Rows of these kinds in turn in one batch of columns, as a captured decode step samples: device time."""
    num_rows, vocab_size = logits_NV.shape
    # A captured step leaves rows with bias to others.
    kinds = [kind.replace(logit_bias={}) for kind in kinds]
    one, rows = _sampler(kinds, num_rows, vocab_size, device, "triton"), np.arange(num_rows)
    packed = np.zeros(columns_bytes(num_rows), dtype=np.uint8)
    on_device = torch.zeros(len(packed), dtype=torch.uint8, device=device)
    uniform = one.captured(tensor_columns(on_device, num_rows))
    uniform.fill(array_columns(packed, num_rows), rows)
    on_device.copy_(torch.from_numpy(packed))
    positions_N = torch.full((num_rows,), POSITION, device=device)
    variant = uniform.variant_of(rows, np.full(num_rows, POSITION))
    found = uniform.pick(variant, logits_NV, positions_N)
    _admit(one, kinds, num_rows)  # once more, without the counts of what was found
    differing = int((found != _sample(one, logits_NV)).sum())
    seconds = device_seconds(lambda: uniform.pick(variant, logits_NV, positions_N), device)
    return {"case": f"captured, {case}, {num_rows} rows", "ok": differing == 0, "error": differing, "us": seconds * 1e6}


def _sampler(kinds: Sequence[SamplingParams], num_rows: int, vocab_size: int, where: torch.device, who: str) -> Sampler:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = who
    try:
        one = Sampler(num_rows, vocab_size, 512, where)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    _admit(one, kinds, num_rows)
    return one


def _admit(one: Sampler, kinds: Sequence[SamplingParams], num_rows: int) -> None:
    for row in range(num_rows):
        params = kinds[row % len(kinds)].replace(seed=row)
        one.admit((Newcomer(row, params, np.arange(20, dtype=np.int32) + row, 10),), (2,))


def _sample(one: Sampler, logits_NV: Tensor) -> Tensor:
    num_rows = len(logits_NV)
    return one.sample(logits_NV, np.arange(num_rows), np.full(num_rows, POSITION)).token_ids_N
