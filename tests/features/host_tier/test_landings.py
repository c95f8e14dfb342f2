"""What waits for pages on their way: in which order CUDA is told, and that the attention in front hides nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine.features.host_tier.copy_stream import CudaCopies, DirectCopies, copies_on
from engine.features.host_tier.landings import LandedAttention, Landings
from engine.layers.attention import CapturableAttention, GraphAttentionBuilder
from tests.features.host_tier.late_copies import LateCopies

GPU = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams and events are asked for, in its order."""
    log: list[str] = []

    class Stream:
        device = GPU

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: object) -> None:
            log.append(f"{self.name} waits for {event}")

    class Event:
        def record(self) -> None:
            log.append(f"event on {current[-1].name}")

        def __str__(self) -> str:
            return "the event"

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    current = [Stream("model")]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return log


def test_a_copy_comes_behind_the_model_and_the_model_behind_its_event(told: list[str]) -> None:
    copies = copies_on(GPU)
    assert isinstance(copies, CudaCopies)
    mark = copies.queue(lambda: told.append("copy"))
    copies.wait(mark)
    copies.wait(None)
    assert told == ["copies waits for model", "copy", "event on copies", "model waits for the event"]


def test_on_a_cpu_a_copy_is_made_at_once() -> None:
    copies, made = copies_on(torch.device("cpu")), []
    assert isinstance(copies, DirectCopies)
    copies.wait(copies.queue(lambda: made.append(1)))
    assert made == [1]


def test_each_layer_waits_for_its_own_group_once_and_the_last_for_all() -> None:
    copies, made = LateCopies(), []
    landings = Landings(copies)
    for turn in range(2):
        for layer in (0, 2, 4):
            landings.expect(layer, copies.queue(lambda pair=(turn, layer): made.append(pair)))
    for layer, count in enumerate((4, 4, 5, 5)):
        landings.wait_for(layer)
        assert len(made) == count, f"layer {layer}: all that was queued before its own, and no more"
    landings.settle()
    landings.settle()
    assert made == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4)]
    assert copies.num_waits == 3


@pytest.mark.parametrize("capturable", [True, False])
def test_a_backend_can_be_captured_as_it_could_before(capturable: bool) -> None:
    plain = SimpleNamespace(plan_step=None, attend=None, capturable=capturable)
    landed = LandedAttention(plain, Landings(DirectCopies()))
    assert isinstance(landed, CapturableAttention)
    assert landed.capturable == capturable
    assert not isinstance(landed, GraphAttentionBuilder)
    plain.for_graph = lambda batch: "for a graph"
    assert LandedAttention(plain, Landings(DirectCopies())).for_graph("batch") == "for a graph"
