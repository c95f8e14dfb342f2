"""Observers: told in batches, and none of them can do harm."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine.kv.events import KVEvent
from engine.kv.node import SHARED
from engine.messages import Finish
from engine.plugins.hookspecs import hookimpl
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import PluginError
from tests.plugins.conftest import Install

HOOKIMPL = 'from engine.plugins.hookspecs import hookimpl\n\nCALLBOARD_PLUGIN = {"api": 1}\n'
STORED = KVEvent("stored", "device", SHARED, b"\0" * 32, (b"\1" * 32, b"\2" * 32), b"tokens")
REMOVED = KVEvent("removed", "host", SHARED, b"\0" * 32, (b"\1" * 32,), b"")


def finished(request_id: int, finish: Finish = Finish.LENGTH) -> RequestMetrics:
    return RequestMetrics(request_id, finish, 20, 8, 16, 1, 5.0, 0.002, 0.0123, 0.004, 0.05)


def unstarted(request_id: int) -> RequestMetrics:
    return RequestMetrics(request_id, Finish.ABORT, 20, 0, 0, 0, 5.0, None, None, None, 0.05)


@dataclass  # with equality and without a hash, as an author may write it
class Recorder:
    """Keeps what it is told; raises on the calls whose number is in ``fails``."""

    fails: tuple[int, ...] = ()
    error: BaseException = field(default_factory=lambda: ValueError("planted"))
    told: list[object] = field(default_factory=list)

    def _note(self, what: object) -> None:
        self.told.append(what)
        if len(self.told) in self.fails:
            raise self.error

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        self._note([one.request_id for one in requests])

    @hookimpl
    def callboard_engine_stopped(self) -> None:
        self._note("stopped")


@dataclass
class PageRecorder(Recorder):
    """Is told of pages too."""

    @hookimpl
    def callboard_kv_event(self, events: Sequence[KVEvent]) -> None:
        self._note([event.kind for event in events])


def observed_by(*recorders: Recorder, **options: object) -> Observers:
    """Observers of which each is called observer.<index>."""
    plugins = Plugins({})
    for index, recorder in enumerate(recorders):
        recorder.told.append(index)  # pluggy takes two equal objects for one
        plugins.register(recorder, f"observer.{index}")
        recorder.told.clear()
    return Observers(plugins, {}, page_size=4, **options)


def test_everybody_is_told_in_order() -> None:
    told: list[str] = []

    class Named(Recorder):
        @hookimpl
        def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
            told.append(str(self.fails))

    observers = observed_by(Named((8,)), Named((9,)), Recorder())
    observers.request_finished([finished(3)])
    assert told == ["(8,)", "(9,)"]


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit("planted"), KeyboardInterrupt("planted")])
def test_one_that_raises_is_named_once_and_told_nothing_more_while_others_are(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = PageRecorder(fails=(2,), error=error), PageRecorder()
    observers = observed_by(bad, good)
    for request_id in range(4):
        observers.request_finished([finished(request_id)])
    observers.kv_event([STORED, REMOVED])
    assert bad.told == [[0], [1]]
    assert good.told == [[0], [1], [2], [3], ["stored", "removed"]]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "plugin observer.0 raised in callboard_request_finished" in record.getMessage()
    assert record.exc_info is not None
    assert "planted" in str(record.exc_info[1])


def test_the_end_is_told_to_all_and_survives_one_that_raises_again() -> None:
    bad, good = Recorder(fails=(1, 2)), Recorder()
    observers = observed_by(bad, good)
    observers.request_finished([finished(0)])
    observers.close()
    assert bad.told == good.told == [[0], "stopped"]


def test_one_that_takes_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 0.01, 1.0, 1.2, 2.0, 2.9])
    observers = observed_by(Recorder(), clock=lambda: next(times))
    for request_id in range(3):
        observers.request_finished([finished(request_id)])
    (record,) = caplog.records
    assert "plugin observer.0 took 200 ms in callboard_request_finished" in record.getMessage()


def test_events_are_wanted_only_if_somebody_is_told() -> None:
    assert not observed_by().wants_kv_events
    assert not observed_by(Recorder()).wants_kv_events
    assert observed_by(Recorder(), PageRecorder()).wants_kv_events


def test_an_observer_of_another_distribution_gets_its_options(install: Install) -> None:
    install(
        "acme",
        {"observer.stateful": "stateful", "observer.plain": "plain"},
        {
            "stateful.py": HOOKIMPL
            + "class Observer:\n"
            + "    def __init__(self, context): self.context, self.told = context, []\n"
            + "    @hookimpl\n"
            + "    def callboard_kv_event(self, events): self.told += events\n"
            + "@hookimpl\n"
            + "def callboard_observer(context):\n"
            + "    global observer\n"
            + "    observer = Observer(context)\n"
            + "    return observer\n",
            "plain.py": HOOKIMPL
            + "told = []\n"
            + "@hookimpl\n"
            + "def callboard_request_finished(requests): told.append([one.request_id for one in requests])\n",
        },
    )
    plugins = Plugins({"observer": ["plain", "stateful"]})
    observers = Observers(plugins, {"observer.stateful": {"a": 1}}, page_size=16)
    observers.request_finished([finished(4), finished(5)])
    observers.kv_event([STORED])
    observers.close()
    import plain
    import stateful

    assert plain.told == [[4, 5]]
    assert stateful.observer.told == [STORED]
    assert (stateful.observer.context.page_size, stateful.observer.context.options) == (16, {"a": 1})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("@hookimpl\ndef callboard_observer(context): return object()\n", "observes nothing"),
        ("def callboard_request_finished(requests): ...\n", "observes nothing"),
        ("@hookimpl\ndef callboard_engine_stopped(): ...\n", "observes nothing"),
        ("@hookimpl\ndef callboard_request_finished(requests): ...\n", "takes no options"),
        (
            "class Observer:\n"
            "    @hookimpl\n"
            "    def callboard_kv_events(self, events): ...\n"
            "@hookimpl\n"
            "def callboard_observer(context): return Observer()\n",
            "unknown hook 'callboard_kv_events'",
        ),
    ],
)
def test_an_observer_that_could_not_work_is_refused_at_start(install: Install, source: str, said: str) -> None:
    install("acme", {"observer.bad": "bad"}, {"bad.py": HOOKIMPL + source})
    plugins = Plugins({"observer": ["bad"]})
    with pytest.raises(PluginError, match=said) as refused:
        Observers(plugins, {"observer.bad": {"path": "x"}}, page_size=16)
    assert "observer.bad" in str(refused.value)


def test_the_log_has_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    observers = Observers(Plugins({"observer": ["log"]}), {}, page_size=16)
    caplog.clear()
    assert not observers.wants_kv_events
    observers.request_finished([finished(3), unstarted(4)])
    assert [record.getMessage() for record in caplog.records] == [
        "request=3 finish=length prompt_tokens=20 output_tokens=8 cached_tokens=16 queue_ms=2.0 ttft_ms=12.3 "
        "tpot_ms=4.0 e2e_ms=50.0 retractions=1 priority=0 client=- id=-",
        "request=4 finish=abort prompt_tokens=20 output_tokens=0 cached_tokens=0 queue_ms=- ttft_ms=- "
        "tpot_ms=- e2e_ms=50.0 retractions=0 priority=0 client=- id=-",
    ]
    assert {record.name for record in caplog.records} == {"engine.plugins.observer.log"}


def test_the_log_has_a_line_per_event_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    observers = Observers(Plugins({"observer": ["log"]}), {}, page_size=16)
    caplog.clear()
    assert observers.wants_kv_events
    observers.kv_event([STORED, REMOVED])
    observers.request_finished([finished(3)])
    assert [record.getMessage() for record in caplog.records][:2] == [
        "kv stored tier=device pages=2 first=010101010101 last=020202020202 parent=000000000000",
        "kv removed tier=host pages=1 first=010101010101 last=010101010101 parent=000000000000",
    ]
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.DEBUG, logging.INFO]


def test_the_log_takes_no_options() -> None:
    with pytest.raises(PluginError, match=r"'observer\.log'.*`sped`"):
        Observers(Plugins({"observer": ["log"]}), {"observer.log": {"sped": 1}}, page_size=16)
