"""Checkpoint names of the tensors of a model of transformers, whose newer classes merge tensors that files keep apart.

Owns: that translation, by transformers' own rules.  Does not know: files, ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engine.types.errors import WeightsError


class _Views(TorchFunctionMode):
    """Keeps parts of a tensor as views, so that a write to a part writes to the tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def in_checkpoint(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by their names in a checkpoint; if it has a tensor in parts, the parts are views.

    Raises WeightsError if the checkpoint's order of elements cannot be had as a view."""
    with torch.no_grad(), _Views():
        stored: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))
    given, found = (sum(one.numel() for one in group.values()) for group in (tensors, stored))
    owners = {_storage(one) for one in tensors.values()}
    for name, tensor in stored.items():
        if _storage(tensor) not in owners or given != found:
            raise WeightsError(
                f"{type(module).__name__} cannot be served through transformers: {name!r} is converted as it is loaded"
            )
    return stored


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
