"""The kernels of recurrent layers beside torch, at sizes of real models: results, states, time, bandwidth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.choice import choose_kernels
from engine.layers.recurrences import Recurrences
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.torch_recurrences import TorchRecurrences
from gpu_sections.kernels import no_kernels
from gpu_sections.rows import Row, device_seconds, seconds_of

TORCH = TorchRecurrences()
# Of the largest number.  Sums over a prompt in float32; of a model in bfloat16, so are the factors of three products.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DECODES = (1, 8, 64, 256)
PROMPTS = ((2048,), (1, 1, 700, 5, 130, 64, 1))


class Sizes(NamedTuple):
    """Sizes of a layer, as in ``GatedDeltaShape`` and ``Mamba2Shape``."""

    heads: int
    groups: int
    key: int
    value: int
    taps: int = 4

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.heads * self.value + 2 * self.groups * self.key

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of a row's states."""
        return (self.taps - 1, self.channels), (self.heads, self.key, self.value)


DELTA, MAMBA = "gated delta rule", "Mamba 2"
MODELS: Mapping[str, tuple[str, Sequence[int]]] = {
    "Qwen3-Next": (DELTA, Sizes(32, 16, 128, 128)),
    "Qwen3.5-0.8B": (DELTA, Sizes(16, 16, 128, 128)),
    "Granite-4-H-tiny": (MAMBA, Sizes(48, 1, 128, 64)),
}
Operation = Callable[[Recurrences, RecurrentStates, StatesOfStep], Tensor]


def section(
    device: torch.device,
    models: Mapping[str, tuple[str, Sequence[int]]] = MODELS,
    decodes: Sequence[int] = DECODES,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> Iterator[Row]:
    """Yield a row for each model, operation, dtype and step."""
    kernels = choose_kernels(device)
    if kernels is None:
        yield from no_kernels(device)
        return
    assert kernels.recurrences is not None
    steps = [*((1,) * count for count in decodes), *prompts]
    for model, (kind, numbers) in models.items():
        sizes = Sizes(*numbers)
        for dtype in BOUNDS:
            for lengths in steps:
                for name, operation in _operations(kind, sizes, sum(lengths), dtype, device).items():
                    case = f"{model}: {name}, {str(dtype).removeprefix('torch.')}, {_named(lengths)}"
                    row = _compared(kernels.recurrences, operation, sizes, lengths, BOUNDS[dtype], device)
                    if name == kind and max(lengths) == 1:  # all but the first row's matrices are read, and all written
                        numbers_of_row = sizes.heads * sizes.key * sizes.value
                        num_bytes = (2 * len(lengths) - 1) * numbers_of_row * torch.float32.itemsize
                        row["gb_per_s"] = num_bytes / (row["us"] / 1e6) / 1e9
                    yield {"case": case, **row}


def _named(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} decodes" if max(lengths) == 1 else f"rows of {', '.join(map(str, lengths))} tokens"


def _compared(
    ours: Recurrences, operation: Operation, sizes: Sizes, lengths: Sequence[int], bound: float, device: torch.device
) -> Row:
    """Compare results and states with torch's, of rows in mid-sequence but for the first; then time both."""
    counts = np.array(lengths, dtype=np.int32)
    before = counts * 0 + 5
    before[0] = 0
    slots = np.arange(len(counts))[::-1].astype(np.int64)
    states = [RecurrentStates([sizes.states], len(counts) + 1, device) for _ in range(2)]
    states[0].data.normal_(0, 0.1, generator=torch.Generator(device).manual_seed(7))
    states[1].data.copy_(states[0].data)
    calls = [
        partial(operation, way, one, StatesOfStep(one, slots, counts + before, counts))
        for way, one in zip((ours, TORCH), states, strict=True)
    ]
    found, expected = (call() for call in calls)
    error = max(_error(found, expected), _error(states[0].data, states[1].data))
    seconds, plain = device_seconds(calls[0], device), seconds_of(calls[1], device)
    row = {"ok": error <= bound, "error": error, "us": seconds * 1e6, "of_plain": plain / seconds}
    return row


def _error(found: Tensor, expected: Tensor) -> float:
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6))


def _operations(
    kind: str, sizes: Sizes, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Operation]:
    """Return the operations of a layer on random tokens, by their names."""
    generator = torch.Generator(device).manual_seed(num_tokens)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    inner = sizes.heads * sizes.value
    product = drawn(num_tokens, sizes.channels + inner + 2 * sizes.heads, dtype=dtype)
    x_TC, z_TI, a_TH, b_TH = product.split([sizes.channels, inner, sizes.heads, sizes.heads], -1)
    weight_KC, bias_C = drawn(sizes.taps, sizes.channels), drawn(sizes.channels, dtype=dtype)
    channels_TC, o_TI = drawn(num_tokens, sizes.channels), drawn(num_tokens, inner)
    decay_H, bias_H, skip_H = -drawn(sizes.heads).exp() * 0.3, drawn(sizes.heads), drawn(sizes.heads)
    norm, num_groups = (drawn(sizes.value), sizes.heads) if kind == DELTA else (drawn(inner), sizes.groups)

    def convolve(way: Recurrences, states: RecurrentStates, step: StatesOfStep) -> Tensor:
        return way.convolve(x_TC, weight_KC, bias_C, states.layers[0][0], step, True)

    def delta(way: Recurrences, states: RecurrentStates, step: StatesOfStep) -> Tensor:
        return way.delta(channels_TC, a_TH, b_TH, decay_H, bias_H, 1.0, states.layers[0][1], step)

    def ssd(way: Recurrences, states: RecurrentStates, step: StatesOfStep) -> Tensor:
        return way.ssd(channels_TC, a_TH, decay_H, bias_H, skip_H, 0.0, states.layers[0][1], step)

    def gate(way: Recurrences, states: RecurrentStates, step: StatesOfStep) -> Tensor:
        return way.gate(o_TI, z_TI, norm, num_groups, 1e-6, kind == MAMBA)

    return {"convolution": convolve, kind: delta if kind == DELTA else ssd, "gate and norm": gate}
