"""Garbage collection while something is captured."""

import gc

import pytest

from engine.graphs.capturing import frozen_garbage


@pytest.fixture(autouse=True)
def unfrozen(collector):
    gc.unfreeze()


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self):
        self.me = self


@pytest.fixture
def collections():
    """Generations collected while the test runs."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_nothing_is_collected_inside(collections):
    with frozen_garbage():
        assert collections == [2]  # what was garbage before went first
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 1000
        for _ in range(5000):
            Cycle()
        assert collections == [2]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert collections[-1] == 2  # and what the captures left goes at the end


def test_a_failure_inside_restores_the_collector():
    with pytest.raises(RuntimeError, match="capture"), frozen_garbage():
        raise RuntimeError("capture")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_was_off_or_frozen_stays_so():
    gc.disable()
    gc.freeze()
    try:
        with frozen_garbage():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
