"""Kernels that begin while the one in front of them ends: the same bits as one after the other, and how much sooner.

Each link of a chain reads what the one before it has written a moment ago, in a graph and without: a kernel that does
not wait where it must is seen here, and a run of many links shows what the launches cost.

Legend: T tokens · D model dim · H head size
"""

from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from engine.kernels import dependent_launch
from engine.kernels.choice import choose_kernels
from engine.kernels.fused import FusedKernels
from gpu_sections.kernels import no_kernels
from gpu_sections.rows import Row, device_seconds

WIDTH, QUERIES, KEYS, HEAD_SIZE = 1024, 4, 2, 128
DTYPE = torch.bfloat16
REPEATS = 20  # of a chain: an order that does not hold is not seen every time


def section(device: torch.device, num_links: int = 64, sizes: Sequence[int] = (2, 64, 2048)) -> Iterator[Row]:
    """sizes: tokens, an even number.  Times of a chain are of the device, in one graph."""
    kernels = choose_kernels(device)
    if kernels is None:
        yield from no_kernels(device)
        return
    for num_tokens in sizes:
        chain = chained(kernels, num_tokens, num_links, device)
        with patch.object(dependent_launch, "has_dependent_launch", lambda _: False):
            expected, in_order = chain(), device_seconds(chain, device, calls=1)
        differing = sum(int((chain() != expected).sum()) for _ in range(REPEATS if device.type == "cuda" else 1))
        seconds = device_seconds(chain, device, calls=1)
        yield {
            "case": f"{num_links} links of 5 kernels, {num_tokens} tokens",
            "ok": differing == 0 and bool(expected.isfinite().all()),
            "error": differing,
            "us": seconds * 1e6,
            "of_plain": in_order / seconds,
        }


def chained(kernels: FusedKernels, num_tokens: int, num_links: int, device: torch.device) -> Callable[[], Tensor]:
    """A function that returns [T, D], the end of the chain from a start that is always the same."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPE)

    start_TD, update_TD, weight_D = numbers(num_tokens, WIDTH), numbers(num_tokens, WIDTH), numbers(WIDTH)
    slots_SGH = torch.zeros((2, num_tokens, KEYS, HEAD_SIZE), dtype=DTYPE, device=device)
    positions_T = torch.arange(num_tokens, device=device)
    halves_T = positions_T % (num_tokens // 2)
    frequencies = torch.arange(1, HEAD_SIZE // 2 + 1, device=device, dtype=torch.float32) / HEAD_SIZE

    def chain() -> Tensor:
        x_TD, link_TD = start_TD.clone(), update_TD
        for _ in range(num_links):
            normed_TD = kernels.add_norm(x_TD, link_TD, weight_D, 1e-6)
            qkv_TAH = normed_TD.view(num_tokens, QUERIES + 2 * KEYS, HEAD_SIZE)
            angles_TH = kernels.angle_table(positions_T, frequencies, 1.0)
            q_TQH = kernels.rotate_and_store(qkv_TAH, None, 1e-6, angles_TH, slots_SGH[0], slots_SGH[1], positions_T)
            turned_TD = torch.cat((q_TQH, slots_SGH[0], slots_SGH[1]), 1).flatten(1)
            gated_TD = kernels.gated(turned_TD.view(num_tokens // 2, 2 * WIDTH))
            link_TD = kernels.embed_shard(halves_T, gated_TD, 0)
        return kernels.add_norm(x_TD, link_TD, weight_D, 1e-6)

    return chain
