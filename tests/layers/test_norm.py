"""Normalisation against its definition in float64, before and after packing, also where eps decides."""

import pytest
import torch
from torch import Tensor

from engine.layers.norm import HeadNorm, RMSNorm

CPU = torch.device("cpu")


def definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_both_norms_follow_the_definition(scale: float, packed: bool, dtype: torch.dtype, tolerance: float):
    generator = torch.Generator().manual_seed(0)
    x_TAH = (scale * torch.randn(5, 7, 32, generator=generator)).to(dtype)[:, :6]
    plain = RMSNorm(32, 1e-6, CPU, dtype)
    heads = HeadNorm(4, 2, 32, 1e-6, CPU, dtype)
    for norm, x in ((plain, x_TAH.reshape(-1, 32)), (heads, x_TAH)):
        weight = torch.rand(norm.weight.shape, generator=generator).to(dtype)
        norm.weight.copy_(weight)
        if packed:
            norm.pack()
        worst = (norm(x).double() - definition(x, weight, 1e-6)).abs().max()
        assert norm(x).dtype == dtype
        assert worst <= tolerance, f"{type(norm).__name__} differs by {worst}"
