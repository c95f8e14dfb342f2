"""What a checkpoint calls the tensors of a model of transformers, whose newer classes merge what files have apart.

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
    """A part of a tensor stays a view of it: what is written to the part is written to the tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def in_checkpoint(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by a checkpoint's names; one that the checkpoint has in parts is there as views of its parts.

    Raises WeightsError if the checkpoint has them in an order that no view has."""
    with torch.no_grad(), _Views():
        stored: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))
    told, found = (sum(one.numel() for one in group.values()) for group in (tensors, stored))
    owners = {_storage(one) for one in tensors.values()}
    for name, tensor in stored.items():
        if _storage(tensor) not in owners or told != found:
            raise WeightsError(
                f"{type(module).__name__} cannot be served through transformers: {name!r} is converted as it is loaded"
            )
    return stored


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
