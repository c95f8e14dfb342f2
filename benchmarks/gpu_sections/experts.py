"""A layer of experts by the kernel for all of them, captured, beside one product for each, which waits for values; and
two halves of the experts, as ranks that divide them have them, whose results must add up.  Then experts in 4 bits, as
files in MXFP4 have them, and in float8, beside the bfloat16 weights that they stand for.

Sizes are of Qwen3-30B-A3B, and of gpt-oss-20b.  GB/s counts the weights of the experts that are visited, each once.
"""

from collections.abc import Iterator
from functools import partial

import torch

from engine.checkpoints.shape import ExpertsShape, RouterShape
from engine.formats.mxfp4 import decoded
from engine.kernels.choice import choose_kernels
from engine.kernels.float8 import rounded
from engine.layers.experts import Experts
from engine.layers.float8_experts import BLOCK, EightBits
from engine.layers.four_bits import FourBits, StoredCodes
from engine.layers.kernels import DeviceKernels, LayerKernels
from engine.layers.router import Router
from engine.plugins.comm.local import LocalComm
from gpu_sections.kernels import no_kernels
from gpu_sections.rows import Row, device_seconds, seconds_of

BOUND = 3e-2  # of results around 1: both sides round to bfloat16 between the products and after each expert
INTERPRETED_BOUND = 0.25  # of float8, which the interpreter rounds otherwise: a GPU's bits come from tests of kernels


def section(
    device: torch.device,
    num_experts: int = 128,
    hidden_size: int = 2048,
    expert_size: int = 768,
    batches: tuple[int, ...] = (1, 8, 64, 512, 4096),
) -> Iterator[Row]:
    """A row per number of tokens."""
    kernels = choose_kernels(device)
    if not isinstance(kernels, DeviceKernels):
        yield from no_kernels(device)
        return
    yield from _choices(kernels, device, num_experts, hidden_size, batches)
    shape = ExpertsShape(
        num_experts=num_experts, num_chosen=8, expert_size=expert_size, activation="silu", router=RouterShape()
    )
    layer = Experts(shape, hidden_size, LocalComm(), device, torch.bfloat16)
    for number, one in enumerate(layer.slices("")):
        generator = torch.Generator(device).manual_seed(number)
        one.target.normal_(0, one.target.shape[-1] ** -0.5 * 2, generator=generator)
    steps = []
    for num_tokens in batches:
        generator = torch.Generator(device).manual_seed(num_tokens)
        x_TD = torch.randn((num_tokens, hidden_size), generator=generator, device=device).bfloat16()
        plain = seconds_of(lambda x_TD=x_TD: layer(x_TD, None), device)
        steps.append((x_TD, layer(x_TD, None), plain))
    layer.on_gpu = True  # where the section tries itself on a CPU
    layer.pack(kernels)
    for x_TD, expected_TD, plain in steps:
        error = float((layer(x_TD, kernels) - expected_TD).abs().max() / expected_TD.abs().max())
        seconds = device_seconds(lambda x_TD=x_TD: layer(x_TD, kernels), device)
        halves = _sum_of_halves(layer, kernels, x_TD)
        error = max(error, float((halves - expected_TD).abs().max() / expected_TD.abs().max()))
        visited = layer.router(x_TD)[1].unique().numel()
        num_bytes = visited * 3 * hidden_size * expert_size * torch.bfloat16.itemsize
        yield {
            "case": f"{num_experts} experts, {len(x_TD)} tokens",
            "ok": error <= BOUND,
            "error": error,
            "us": seconds * 1e6,
            "of_plain": plain / seconds,
            "gb_per_s": num_bytes / seconds / 1e9,
        }


def _choices(
    kernels: DeviceKernels, device: torch.device, num_experts: int, hidden_size: int, batches: tuple[int, ...]
) -> Iterator[Row]:
    """A row per number of tokens and kind of router: both products included, the choice in one launch or by torch."""
    groups = RouterShape(scoring="sigmoid", corrected=True, exact=True, num_groups=4, num_chosen_groups=2)
    for name, shape in (("softmax", RouterShape()), ("corrected sigmoids in groups", groups)):
        router = Router(shape, hidden_size, num_experts, min(8, num_experts // 2), device, torch.bfloat16)
        router.linear.weight.normal_(0, hidden_size**-0.5)
        if router.correction_E is not None:
            router.correction_E.normal_(0, 0.1)
        for num_tokens in batches:
            x_TD = torch.randn((num_tokens, hidden_size), device=device).bfloat16()
            found, seconds = [], []
            for own in (None, kernels):
                call = partial(router, x_TD, own)
                weights_TK, experts_TK = call()
                spread_TE = torch.zeros((num_tokens, num_experts), device=device)
                found.append(spread_TE.scatter_(1, experts_TK, weights_TK.float()))
                seconds.append(device_seconds(call, device))
            # Equal scores may be chosen in another order: bfloat16 has few numbers.
            differ = float(((found[1] - found[0]).abs().amax(1) > BOUND).float().mean())
            yield {
                "case": f"choice by {name}, {num_tokens} tokens",
                "ok": differ <= 0.05,
                "differ": differ,
                "us": seconds[1] * 1e6,
                "of_torch": seconds[0] / seconds[1],
            }


def four_bits(
    device: torch.device,
    num_experts: int = 32,
    hidden_size: int = 2880,
    expert_size: int = 2880,
    batches: tuple[int, ...] = (1, 8, 64, 512, 4096),
) -> Iterator[Row]:
    """A row per number of tokens; of_bfloat16 is how many times as fast as with weights in bfloat16."""
    kernels = choose_kernels(device)
    if kernels is None:
        yield from no_kernels(device)
        return
    stacks: list[tuple[FourBits, torch.Tensor]] = []
    generator = torch.Generator(device).manual_seed(0)
    for outputs, inputs in ((2 * expert_size, hidden_size), (hidden_size, expert_size)):
        memory = StoredCodes(num_experts, outputs, inputs, device)
        memory.codes_EOGB.random_(0, 256, generator=generator)
        memory.scales_EOG.random_(118, 122, generator=generator)
        pairs = zip(memory.codes_EOGB, memory.scales_EOG, strict=True)
        floats = torch.stack([decoded(codes.cpu(), scales.cpu()).bfloat16().to(device) for codes, scales in pairs])
        stacks.append((memory.arranged(), floats))
    biases = [torch.zeros(num_experts, outputs, device=device).bfloat16() for outputs in (2 * expert_size, hidden_size)]
    codes, weights = zip(*stacks, strict=True)
    for num_tokens in batches:
        generator = torch.Generator(device).manual_seed(num_tokens)
        x_TD = torch.randn((num_tokens, hidden_size), generator=generator, device=device).bfloat16()
        chosen_TK = torch.rand((num_tokens, num_experts), generator=generator, device=device).topk(4).indices
        weights_TK = torch.full((num_tokens, 4), 0.25, device=device, dtype=torch.bfloat16)
        found, seconds = [], []
        for experts in (weights, codes):
            args = (x_TD, weights_TK, chosen_TK, *experts, *biases, "clamped_swish", 7.0, 1.702)
            mix = partial(kernels.mix_experts, *args)
            found.append(mix())
            seconds.append(device_seconds(mix, device))
        error = float((found[1] - found[0]).abs().max() / found[0].abs().max())
        visited = chosen_TK.unique().numel()
        num_bytes = visited * 3 * hidden_size * expert_size * 17 / 32
        yield {
            "case": f"{num_experts} experts in 4 bits, {num_tokens} tokens",
            "ok": error <= BOUND,
            "error": error,
            "us": seconds[1] * 1e6,
            "of_bfloat16": seconds[0] / seconds[1],
            "gb_per_s": num_bytes / seconds[1] / 1e9,
        }


def eight_bits(
    device: torch.device,
    num_experts: int = 128,
    hidden_size: int = 2048,
    expert_size: int = 768,
    batches: tuple[int, ...] = (1, 8, 64, 512, 4096),
) -> Iterator[Row]:
    """A row per number of tokens, weights in float8 with a scale per block; of_bfloat16 is how many times as fast as
    bfloat16 weights of the same values."""
    kernels = choose_kernels(device)
    if kernels is None:
        yield from no_kernels(device)
        return
    stacks: list[tuple[EightBits, torch.Tensor, torch.Tensor]] = []
    generator = torch.Generator(device).manual_seed(0)
    for outputs, inputs in ((2 * expert_size, hidden_size), (hidden_size, expert_size)):
        drawn = torch.randn((num_experts, outputs, inputs), generator=generator, device=device)
        elements = drawn.to(torch.float8_e4m3fn)
        blocks = (num_experts, outputs // BLOCK, inputs // BLOCK)
        scales = (0.5 + torch.rand(blocks, generator=generator, device=device)) * inputs**-0.5
        spread = scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        floats = elements.float() * spread
        stacks.append((EightBits(elements, scales), floats.bfloat16(), floats))
    stored, weights, exact = zip(*stacks, strict=True)
    for num_tokens in batches:
        generator = torch.Generator(device).manual_seed(num_tokens)
        x_TD = torch.randn((num_tokens, hidden_size), generator=generator, device=device).bfloat16()
        chosen_TK = torch.rand((num_tokens, num_experts), generator=generator, device=device).topk(8).indices
        weights_TK = torch.full((num_tokens, 8), 0.125, device=device, dtype=torch.bfloat16)
        found, seconds = [], []
        for experts in (weights, stored):
            mix = partial(kernels.mix_experts, x_TD, weights_TK, chosen_TK, *experts, None, None, "silu")
            found.append(mix())
            seconds.append(device_seconds(mix, device))
        exact_TD = _by_rounded_rows(x_TD, chosen_TK, *exact) / 8
        error = float((found[1].float() - exact_TD).abs().max() / exact_TD.abs().max())
        visited = chosen_TK.unique().numel()
        yield {
            "case": f"{num_experts} experts in float8, {num_tokens} tokens",
            "ok": error <= (BOUND if device.type == "cuda" else INTERPRETED_BOUND),
            "error": error,
            "us": seconds[1] * 1e6,
            "of_bfloat16": seconds[0] / seconds[1],
            "gb_per_s": visited * 3 * hidden_size * expert_size / seconds[1] / 1e9,
        }


def _by_rounded_rows(
    x_TD: torch.Tensor, chosen_TK: torch.Tensor, gate_up_EOI: torch.Tensor, down_EDI: torch.Tensor
) -> torch.Tensor:
    """Return the sum of each token's experts, whose inputs are rounded to float8 in groups, in float32."""
    out_TD = torch.zeros(x_TD.shape, device=x_TD.device)
    for expert in chosen_TK.unique().tolist():
        tokens = (chosen_TK == expert).any(1).nonzero()[:, 0]
        gate_TI, up_TI = (_as_rounded(x_TD[tokens]) @ gate_up_EOI[expert].t()).chunk(2, 1)
        out_TD[tokens] += _as_rounded(torch.nn.functional.silu(gate_TI) * up_TI) @ down_EDI[expert].t()
    return out_TD


def _as_rounded(x_TI: torch.Tensor) -> torch.Tensor:
    elements_TI, scales_TG = rounded(x_TI, BLOCK)
    return (elements_TI.float() * scales_TG.repeat_interleave(BLOCK, 1))[: len(x_TI)]


def _sum_of_halves(layer: Experts, kernels: LayerKernels, x_TD: torch.Tensor) -> torch.Tensor:
    """What two ranks would add up."""
    gate_up, down = (stack.weights for stack in layer._stacks)
    weights_TK, experts_TK = layer.router(x_TD)
    half, parts = len(gate_up) // 2, []
    for first in (0, half):
        here = slice(first, first + half)
        parts.append(
            kernels.mix_experts(
                x_TD, weights_TK, experts_TK, gate_up[here], down[here], None, None, "silu", first_expert=first
            )
        )
    return parts[0] + parts[1]
