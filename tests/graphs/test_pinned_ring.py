"""Page-locked memory is handed out again only when no copy uses it and nobody reads it any more."""

import pytest
import torch

from engine.graphs.pinned_ring import PinnedReceiver, PinnedRing
from tests.graphs.recording import RecordingDevice


class Event:
    """Reached when it is told so, or waited for."""

    def __init__(self, log):
        self.log, self.pending = log, False

    def record(self):
        self.pending = True

    def query(self):
        return not self.pending

    def synchronize(self):
        self.log.append("waited")
        self.pending = False


@pytest.fixture
def log():
    return []


@pytest.fixture
def device(log):
    device = RecordingDevice()
    device.event = lambda: Event(log)
    return device


def test_a_letter_is_sent_again_when_its_copy_is_done(device, log):
    outbox = PinnedRing(device, 3, 16)
    letters = [outbox.take() for _ in range(3)]
    assert len({letter.data.data_ptr() for letter in letters}) == 3
    for letter in letters:
        assert letter.data.nbytes == 16
        letter.event.record()
    letters[0].event.pending = False
    assert outbox.take() is letters[0]
    assert log == []
    assert outbox.take() is letters[1]
    assert log == ["waited"]


def test_what_has_been_received_stays_until_it_is_dropped(device, log):
    inbox = PinnedReceiver(device, 64)
    source = device.buffer((8,), torch.int64)
    held = []
    for number in range(6):
        held.append(inbox.receive(source.fill_(number)[: 2 + number]))
    assert [content.tolist() for content, _ in held] == [[number] * (2 + number) for number in range(6)]
    address = held[2][0].data_ptr()
    for _, event in held:
        event.pending = False
    del held[2]
    content, event = inbox.receive(source.fill_(9))
    assert content.data_ptr() == address
    assert [one.tolist()[0] for one, _ in held] == [0, 1, 3, 4, 5]
    del content  # dropped unread, while its copy is still on the way
    inbox.receive(source)
    assert log == ["waited"]
