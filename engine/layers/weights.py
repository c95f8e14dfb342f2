"""How a rank's parameter is cut from a checkpoint tensor: layers describe it, the loader obeys.

Owns: the description.  Does not know: files, which layer is asking.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """``source``[start : start + length along ``dim``] of the checkpoint goes to ``target``.

    shape: of the whole tensor in the checkpoint.  target: a view of a parameter; where it is longer than
    ``length`` along ``dim``, the rest is padding and becomes zero.
    """

    source: str
    shape: tuple[int, ...]
    dim: int
    start: int
    length: int
    target: Tensor


def whole(source: str, target: Tensor) -> WeightSlice:
    """A tensor that every rank holds in full."""
    return WeightSlice(source, tuple(target.shape), 0, 0, target.shape[0], target)


def parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Memory for a weight, not initialised: the loader fills every element."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def share(total: int, size: int, what: str) -> int:
    """One rank's part of ``total``.  Raises ConfigError if it cannot be divided evenly."""
    if total % size:
        raise ConfigError(f"the model has {what}={total}, which {size} ranks cannot share evenly")
    return total // size
