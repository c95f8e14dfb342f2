"""What takes long is named while it does, and what may be given up is."""

import threading
import time

import pytest

from engine.host import timeouts as patience
from engine.host.timeouts import named_while_slow, returns_within

FAR_S = 30.0


def until(condition) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < FAR_S
        time.sleep(0.002)


def test_a_block_is_named_until_it_is_over(monkeypatch, caplog):
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.01)
    with named_while_slow("plugin attention.theirs: its trial"):
        until(lambda: len(caplog.messages) >= 3)
    (watch,) = [one for one in threading.enumerate() if one.name.startswith("watch of plugin")] or [None]
    if watch is not None:
        watch.join(FAR_S)
    said = [f"plugin attention.theirs: its trial has taken {seconds:g} s so far" for seconds in (0.01, 0.02, 0.04)]
    assert caplog.messages[:3] == said


def test_a_short_one_is_not(caplog):
    with named_while_slow("nothing"):
        pass
    assert caplog.messages == []
    assert patience.SAY_AFTER_S < 10, "what hangs is named within ten seconds"


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(9)])
def test_what_the_work_raises_is_raised(error):
    def work():
        raise error

    with pytest.raises(type(error)):
        returns_within(FAR_S, work, "work")


def test_work_that_does_not_return_is_left_behind():
    over = threading.Event()
    assert not returns_within(0.01, over.wait, "work that hangs")
    over.set()
    assert returns_within(FAR_S, over.wait, "work")
