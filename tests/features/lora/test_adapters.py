"""Steps with adapters go past graphs that have none, and steps without any are replayed as ever."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.features.lora.adapters import AdaptedDecodes, AdaptedModel, RankAdapters
from engine.features.lora.layers import AdaptedRows, AdaptedWeight


class Wide:
    """Returns twice the input, wider than one matrix; counts its calls."""

    nbytes = 7

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        return torch.cat((x_TI, x_TI), 1)


class Adapters:
    """Of a rank whose step has some, or none."""

    def __init__(self) -> None:
        self.in_step = False
        self.said: list[str] = []

    def begin(self, wanted_N: torch.Tensor | None) -> None:
        self.said.append("begin")

    def end(self) -> None:
        self.said.append("end")


def model(name: str) -> Any:
    return SimpleNamespace(
        name=name,
        forward=lambda step: f"{name} forward",
        hidden=lambda step, wanted: f"{name} hidden",
        logits=lambda states: f"{name} logits of {states}",
    )


def test_only_steps_without_adapters_are_replayed() -> None:
    adapters: Any = Adapters()
    usual = AdaptedModel(model("plain"), model("captured"), adapters)
    decodes = AdaptedDecodes(SimpleNamespace(fits=lambda rows: rows < 9, apply=lambda step: "told"), adapters)  # type: ignore[arg-type]
    step: Any = SimpleNamespace(sample_at_N=None)
    assert usual.forward(step) == "captured forward"
    assert usual.hidden(step, torch.zeros(1)) == "captured hidden"
    assert (decodes.fits(8), decodes.fits(9)) == (True, False)
    assert not adapters.said
    adapters.in_step = True
    assert usual.forward(step) == "plain logits of plain hidden"
    assert not decodes.fits(8)
    assert adapters.said == ["begin", "end"]
    assert usual.name == "captured"
    assert decodes.apply(step) == "told"


def test_what_fails_in_a_step_leaves_no_row_with_an_adapter() -> None:
    adapters: Any = Adapters()
    adapters.in_step = True
    broken = SimpleNamespace(hidden=lambda step, wanted: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        AdaptedModel(broken, broken, adapters).hidden(SimpleNamespace(), torch.zeros(1))  # type: ignore[arg-type]
    assert adapters.said == ["begin", "end"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_gets_its_own_adapter_and_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows, sizes, slots = AdaptedRows(), (5, 7), 3
    weight = AdaptedWeight(Wide(), rows, 6, sizes, slots, 4, torch.device("cpu"), dtype)
    a = torch.randn(slots, 2, 4, 6, dtype=dtype)
    b = [torch.randn(slots, size, 4, dtype=dtype) for size in sizes]
    for slot in range(slots):
        for matrix in range(2):
            rank = 2 + matrix + slot % 2  # less than there is room for
            weight.put(slot, matrix, a[slot, matrix, :rank], b[matrix][slot, :, :rank].t())
            a[slot, matrix, rank:] = 0
    weight.empty(2)
    a[2] = 0
    x = torch.randn(9, 12, dtype=dtype)[:, ::2]
    plain = Wide()(x, None)
    assert torch.equal(weight(x, None), plain)
    slot_of = torch.tensor([0, 1, -1, 2, 1, 0, -1, 1, 2])
    rows.set(slot_of, 0, 3, dtype)
    expected = plain.double()
    for row, slot in enumerate(slot_of.tolist()):
        if slot >= 0:
            parts = [b[m][slot].double() @ (a[slot, m].double() @ x[row].double()) for m in range(2)]
            expected[row] += torch.cat(parts)
    torch.testing.assert_close(weight(x, None).double(), expected, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)
    rows.clear()
    assert torch.equal(weight(x, None), plain)
    assert weight.nbytes == 7 + weight.slot_bytes > 7


class Copies(TorchDispatchMode):
    """Notes of each copy to another device whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.waits.append(not kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


def test_a_step_with_adapters_waits_for_no_copy() -> None:
    adapters: Any = RankAdapters.__new__(RankAdapters)
    adapters._device, adapters._dtype = torch.device("meta"), torch.bfloat16
    adapters._rows, adapters._last_rows = AdaptedRows(), AdaptedRows()
    adapters._slots_T = np.array([0, 2, 2, 3])
    with Copies() as copies:
        adapters.begin(torch.zeros(2, dtype=torch.int64, device="meta"))
    assert copies.waits == [False]
    assert adapters._rows.reads_TS1.shape == (4, 2, 1)
    assert adapters._last_rows.reads_TS1.shape == (2, 2, 1)
