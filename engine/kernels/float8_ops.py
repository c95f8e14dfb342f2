"""Rounding to float8 on a device, by a kernel or by torch, as operations that a compiler leaves alone.

Legend: T rows · I features · D model dim
Owns: the choice between the two.  Does not know: products, weights, the arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.choice import choose_kernels
from engine.kernels.float8 import FLOAT8, Rounded, num_rounded, rounded

ROUND = "callboard::round_rows"
ADD_NORM_ROUND = "callboard::add_norm_round"


def round_rows(x_TI: Tensor, group: int = 0) -> Rounded:
    """Return ``rounded`` rows: by one launch if kernels run, by seven of torch if not.  Traced as one operation."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.callboard.round_rows(x_TI, group)
    kernels = choose_kernels(x_TI.device)
    if kernels is None or x_TI.shape[1] > kernels.widest_rounded:
        return rounded(x_TI, group)
    return kernels.round_rows(x_TI, group)


@torch.library.custom_op(ROUND, mutates_args=())
def _round(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return round_rows(x, group)


@torch.library.custom_op(ADD_NORM_ROUND, mutates_args=("x",))
def _add_norm_round(x: Tensor, update: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor]:
    """Add ``update`` to x; return the sum's RMS norm, rounded (``engine/graphs/norm_rounding.py``)."""
    kernels = choose_kernels(x.device)
    if kernels is None or x.shape[1] > kernels.widest_rounded:
        return rounded(F.rms_norm(x.add_(update), weight.shape, weight, eps), group)
    return kernels.add_norm_round(x, update, weight, eps, group)


@_round.register_fake
def _round_traced(x: Tensor, group: int) -> Rounded:
    rows, width = num_rounded(x.shape[0], group), x.shape[1]
    numbers = x.new_empty((rows, width), dtype=FLOAT8)
    if not group:
        return numbers, x.new_empty((rows, 1), dtype=torch.float32)
    return numbers, x.new_empty((width // group, rows), dtype=torch.float32).t()


@_add_norm_round.register_fake
def _add_norm_round_traced(x: Tensor, update: Tensor, weight: Tensor, eps: float, group: int) -> Rounded:
    return _round_traced(x, group)
