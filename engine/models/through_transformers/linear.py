"""A linear layer of transformers, computed by one of ours: cut over ranks, multiplied by the chosen kernel.

Legend: T tokens of the step · I input features · O output features of this rank
Owns: the exchange, and which layers a tensor-parallel plan cuts.  Does not know: models, kernels, files.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.layers.comm import Comm
from engine.layers.linear import ColumnLinear, Linear, RowLinear
from engine.layers.weights import WeightSlice, whole

# Styles of transformers' plans.  What has another one is held whole by each rank, which is always right.
BY_OUTPUTS, BY_INPUTS = "colwise", "rowwise"
ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}  # they choose experts, and are never rounded


class SwappedLinear(nn.Module):
    """Takes the place of an ``nn.Linear``.  name: of its tensors in the model, without ``.weight``."""

    def __init__(
        self, name: str, replaced: nn.Linear, cut: str, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name = name
        bias = replaced.bias is not None
        inputs, outputs = replaced.in_features, replaced.out_features
        self.linear: Linear
        if cut == BY_OUTPUTS:
            self.linear = ColumnLinear(inputs, [(name.rpartition(".")[2], outputs)], bias, comm, device, dtype)
        elif cut == BY_INPUTS:
            self.linear = RowLinear(inputs, outputs, bias, comm, device, dtype)
        else:
            self.linear = Linear(inputs, outputs, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., O]."""
        y_TO = self.linear(x.flatten(0, -2))
        return y_TO.view(*x.shape[:-1], -1)

    def slices(self) -> Iterator[WeightSlice]:
        """What this rank reads, by the model's names."""
        if isinstance(self.linear, ColumnLinear):
            yield from self.linear.slices(self.name.rpartition(".")[0])
        elif isinstance(self.linear, RowLinear):
            yield from self.linear.slices(self.name)
        else:
            yield whole(f"{self.name}.weight", self.linear.weight)
            if self.linear.bias is not None:
                yield whole(f"{self.name}.bias", self.linear.bias)


def swap_linears(
    model: PreTrainedModel, comm: Comm, device: torch.device, dtype: torch.dtype
) -> dict[str, SwappedLinear]:
    """Swap each plain ``nn.Linear`` of a model, and return those that took their places, by their names.

    Raises ConfigError if there are several ranks and transformers has no plan how they share the model."""
    plan = model._tp_plan
    if comm.size > 1 and not plan:
        raise ConfigError(
            f"device.tensor_parallel={comm.size}: transformers has no tensor-parallel plan for {type(model).__name__}; "
            "set it to 1"
        )
    swapped = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
            cut = _style(plan, name) if comm.size > 1 else ""
            swapped[name] = SwappedLinear(name, module, cut, comm, device, dtype)
    for name, one in swapped.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, one)
    return swapped


def _style(plan: Mapping[str, str], name: str) -> str:
    """A name's style: patterns have ``*`` where names have a number."""
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
