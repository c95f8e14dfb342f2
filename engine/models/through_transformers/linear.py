"""Linear layers of transformers replaced by this engine's: cut over ranks, computed by the chosen kernel, and merged
if several layers of a module get the same input, as those for queries, keys and values do.

Legend: T tokens of the step · I input features · O output features of this rank
Owns: the exchange, which layers a tensor-parallel plan cuts, which layers get the same input.
Does not know: models, kernels, files.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.layers.comm import Comm
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.weights import WeightSlice
from engine.types.errors import ConfigError

# Styles of transformers' plans.  Each rank holds a layer of another style whole, which is always correct.
BY_OUTPUTS, BY_INPUTS = "colwise", "rowwise"
ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}  # they choose experts, and are never rounded


class LinearProduct:
    """The product of one ``nn.Linear``, or of several in one module that are called with the same tensor.

    names: the layers' names in the model, in the order of their calls."""

    def __init__(
        self,
        names: Sequence[str],
        replaced: Sequence[nn.Linear],
        cut: str,
        comm: Comm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.names = names
        inputs, bias = replaced[0].in_features, replaced[0].bias is not None
        self.linear: ColumnLinear | RowLinear
        if cut == BY_INPUTS:
            self.linear = RowLinear(inputs, replaced[0].out_features, bias, comm, device, dtype)
            self._sizes = [replaced[0].out_features]
        else:
            parts = [(_last(name), one.out_features) for name, one in zip(names, replaced, strict=True)]
            shared = comm if cut == BY_OUTPUTS else None
            self.linear = ColumnLinear(inputs, parts, bias, shared, device, dtype)
            self._sizes = [length for *_, length in self.linear.parts]
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def part(self, number: int, x: Tensor) -> Tensor:
        """Return [..., O] of one layer.  The first call computes all of them, and the last one drops them."""
        if len(self._sizes) == 1:
            y_TO = self.linear(x.flatten(0, -2))
            return y_TO.view(*x.shape[:-1], -1)
        if self._input is not x:
            y_TO = self.linear(x.flatten(0, -2))
            self._input = x
            self._outputs = [one.contiguous().view(*x.shape[:-1], -1) for one in y_TO.split(self._sizes, -1)]
        found = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._input, self._outputs = None, []
        return found

    def slices(self) -> Iterator[WeightSlice]:
        """Yield the slices that this rank reads, by the model's names."""
        (name, *_) = self.names
        for one in self.linear.slices(name if isinstance(self.linear, RowLinear) else _parent(name)):
            yield replace(one, source=one.source.removeprefix("."))  # layers of the model itself have no prefix


class SwappedLinear(nn.Module):
    """A stand-in for an ``nn.Linear``: one part of a product."""

    def __init__(self, product: LinearProduct, number: int) -> None:
        super().__init__()
        self._product, self._number = product, number

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., O]."""
        return self._product.part(self._number, x)


def swap_linears(
    model: PreTrainedModel,
    comm: Comm,
    device: torch.device,
    dtype: torch.dtype,
    joined: Collection[tuple[str, ...]] = (),
) -> dict[str, LinearProduct]:
    """Swap each plain ``nn.Linear`` of a model; return the products by the name of their first layer.

    joined: the result of ``same_inputs``.
    Raises ConfigError if there are several ranks and transformers has no plan by which they share the model."""
    plan = model._tp_plan
    if comm.size > 1 and not plan:
        raise ConfigError(
            f"device.tensor_parallel={comm.size}: transformers has no tensor-parallel plan for {type(model).__name__}; "
            "set it to 1"
        )

    def cut(name: str) -> str:
        return _style(plan, name) if comm.size > 1 else ""

    plain = dict(_plain_linears(model))
    together = [names for names in joined if len({cut(name) for name in names}) == 1 and cut(names[0]) != BY_INPUTS]
    taken = {name for names in together for name in names}
    order = {name: place for place, name in enumerate(plain)}
    groups = [*together, *((name,) for name in plain if name not in taken)]
    products = {}
    for names in sorted(groups, key=lambda names: order[names[0]]):
        product = LinearProduct(names, [plain[one] for one in names], cut(names[0]), comm, device, dtype)
        products[names[0]] = product
        for number, name in enumerate(names):
            setattr(model.get_submodule(_parent(name)), _last(name), SwappedLinear(product, number))
    return products


@contextmanager
def same_inputs(model: PreTrainedModel) -> Iterator[list[tuple[str, ...]]]:
    """Record one call of the model, made within the context.  Afterwards the list has groups of names: plain linear
    layers that one module called with the same tensor, unchanged between the calls, each once."""
    found: list[tuple[str, ...]] = []
    calls: list[tuple[str, Tensor, int, bool]] = []

    def record(name: str) -> Callable[[nn.Linear, tuple[Any, ...]], None]:
        def hook(module: nn.Linear, given: tuple[Any, ...]) -> None:
            if given:
                calls.append((name, given[0], given[0]._version, module.bias is None))

        return hook

    hooks = [one.register_forward_pre_hook(record(name)) for name, one in _plain_linears(model)]
    try:
        with torch.inference_mode(False):  # only outside of inference mode tensors count their changes
            yield found
    finally:
        for one in hooks:
            one.remove()
    times = Counter(name for name, *_ in calls)
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, x, version, bias in calls:
        # The members of a list are read one after the other, and each is packed once it is read.
        if times[name] == 1 and not _last(name).isdigit():
            groups.setdefault((_parent(name), id(x), version, bias), []).append(name)
    found += [tuple(names) for names in groups.values() if len(names) > 1]


def _plain_linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and _last(name) not in ROUTERS:
            yield name, module


def _style(plan: Mapping[str, str], name: str) -> str:
    """Return a name's style; patterns have ``*`` in place of numbers."""
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
