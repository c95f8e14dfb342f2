"""Parts of a checkpoint on their way: content, when a buffer is filled again, who is asked about damage and when."""

import pytest
import torch
from torch import Tensor

from engine.models import weight_copies
from engine.models.weight_copies import HostCopies, PinnedCopies, copies_to

CPU = torch.device("cpu")


class Bus:
    """What happens to buffers, in order: ``filled`` when one is given out, ``waited`` when it was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sizes: list[int] = []

    def buffer(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def event(self) -> "Bus.Event":
        return Bus.Event(self, f"buffer {sum(one.startswith('new') for one in self.log)}")

    class Event:
        def __init__(self, bus: "Bus", name: str) -> None:
            self._bus, self._name = bus, name
            bus.log.append(f"new {name}")

        def record(self) -> None:
            self._bus.log.append(f"sent {self._name}")

        def synchronize(self) -> None:
            self._bus.log.append(f"waited for {self._name}")


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    monkeypatch.setattr(weight_copies, "BUFFER_BYTES", 256)
    return Bus()


def pinned(bus: Bus) -> PinnedCopies:
    return PinnedCopies(CPU, bus.buffer, bus.event)


def test_a_buffer_is_filled_again_only_when_its_copy_has_run(bus: Bus) -> None:
    copies, part, target = pinned(bus), torch.randn(20, 16), torch.empty(20, 16)
    bus.log.clear()
    copies.copy(target, part, "weight")  # four rows fit into a buffer
    copies.copy(torch.empty(3), torch.ones(3), "bias")
    assert torch.equal(target, part)
    assert bus.log == [
        "sent buffer 0", "sent buffer 1",
        "waited for buffer 0", "sent buffer 0", "waited for buffer 1", "sent buffer 1",
        "waited for buffer 0", "sent buffer 0", "waited for buffer 1", "sent buffer 1",
    ]  # fmt: skip
    assert bus.sizes == [256, 256]
    assert copies.damaged() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_parts_arrive_in_the_parameters_dtype_also_where_it_is_not_contiguous(
    bus: Bus, dtype: torch.dtype, stored: torch.dtype
) -> None:
    part, whole = torch.randn(7, 10).to(stored), torch.full((7, 16), 9.0, dtype=dtype)
    for copies in (HostCopies(), pinned(bus)):
        whole.fill_(9.0)
        copies.copy(whole.narrow(1, 0, 10), part, "weight")
        assert torch.equal(whole[:, :10], part.to(dtype))
        assert (whole[:, 10:] == 9.0).all()


def test_a_row_that_is_larger_than_a_buffer_gets_a_larger_one(bus: Bus) -> None:
    part, target = torch.randn(3, 100), torch.empty(3, 100)
    pinned(bus).copy(target, part, "weight")
    assert torch.equal(target, part)
    assert bus.sizes == [256, 256, 400, 400]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 9])
def test_damage_is_found_wherever_it_is_and_named(bus: Bus, value: float, row: int) -> None:
    for copies in (HostCopies(), pinned(bus)):
        broken = torch.randn(10, 16)
        broken[row, 5] = value
        copies.copy(torch.empty(4), torch.randn(4), "fine")
        copies.copy(torch.empty(10, 16), broken, "broken")
        copies.copy(torch.empty(10, 16), broken, "broken as well")
        assert copies.damaged() == "broken"


def test_a_number_that_is_too_large_for_the_parameter_alone_is_no_damage(bus: Bus) -> None:
    copies, target = pinned(bus), torch.empty(2, dtype=torch.float16)
    copies.copy(target, torch.tensor([1e30, 1.0]), "weight")
    assert target[0] == torch.inf
    assert copies.damaged() is None


def test_what_is_empty_needs_no_copy(bus: Bus) -> None:
    for copies in (HostCopies(), pinned(bus)):
        copies.copy(torch.empty(0, 4), torch.empty(0, 4), "nothing")
        assert copies.damaged() is None
    assert not [one for one in bus.log if one.startswith("sent")]


def test_a_cpu_has_no_bus() -> None:
    assert isinstance(copies_to(CPU), HostCopies)
