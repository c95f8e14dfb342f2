"""How near a sampled token came to being another one.

A model rounds differently in another batch, which moves the borders between tokens by about 1e-7 of all weight.  A test
that compares sampled tokens over different batches names seeds for which no draw is that near, and finds out here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from engine.kernels.cpu import CPUKernels
from engine.sampling import sampler
from engine.sampling.draw import draw, uniforms

LEAST = 1e-6  # of all weight


@contextmanager
def clear_of_borders() -> Iterator[None]:
    """Raises AssertionError at its end if a draw of this process was too near to the border between two tokens."""
    nearest = 1.0

    def watched(weights_nW: Tensor, uniforms_n: Tensor) -> Tensor:
        nonlocal nearest
        token_ids_n = draw(weights_nW, uniforms_n)
        ends_nW = weights_nW.double().cumsum(-1)
        before_nW = ends_nW - weights_nW
        total_n, at_n1 = ends_nW[:, -1], token_ids_n[:, None]
        target_n = uniforms_n * total_n
        sides = ends_nW.gather(1, at_n1)[:, 0] - target_n, target_n - before_nW.gather(1, at_n1)[:, 0]
        nearest = min(nearest, float((torch.minimum(*sides) / total_n).min()))
        return token_ids_n

    def watched_in_c(_: CPUKernels, weights_nW: Tensor, __: Tensor, starts_n: Tensor, positions_n: Tensor) -> Tensor:
        return watched(weights_nW, uniforms(starts_n, positions_n))

    with patch.object(sampler, "draw", watched), patch.object(CPUKernels, "draw", watched_in_c):
        yield
    assert nearest >= LEAST, f"a draw is {nearest:.1g} of all weight from the border of two tokens: take other seeds"
