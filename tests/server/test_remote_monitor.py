"""A monitor whose engine is elsewhere: answers that come, that come late, that do not come."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.actors.snapshot import Gauges, GetSnapshot, RequestsFinished, Snapshot, Subscribe
from engine.messages import Finish
from engine.plugins.hookspecs import hookimpl
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import RequestError
from server.run.frontend_process import MAX_ASKED, RemoteMonitor
from tests.actors.test_ingress import Sent

INGRESS: Any = SimpleNamespace(num_open=5, num_late_events=2, recovering=True)


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
async def monitor(sent: Sent) -> RemoteMonitor:
    return RemoteMonitor(sent, INGRESS, str)


async def test_an_answer_reaches_who_has_asked_and_ingress_speaks_for_itself(
    monitor: RemoteMonitor, sent: Sent
) -> None:
    looking = [asyncio.ensure_future(monitor.look()), asyncio.ensure_future(monitor.look(meter=True, board=True))]
    await asyncio.sleep(0)
    assert sent.messages == [GetSnapshot(number=1), GetSnapshot(number=2, meter=True, board=True)]
    for number in (2, 1):
        monitor.take(Snapshot(number=number, now=float(number), gauges=Gauges(num_open=9, num_running=3)))
    first, second = await asyncio.gather(*looking)
    assert (first.now, second.now) == (1.0, 2.0)
    assert first.gauges == Gauges(num_open=5, num_running=3, num_late_events=2, recovering=True)


async def test_who_has_waited_long_enough_is_told_so_and_a_late_answer_hurts_nobody(
    monitor: RemoteMonitor, sent: Sent
) -> None:
    with pytest.raises(RequestError, match="does not answer") as silent:
        await monitor.look(patience_s=0.01)
    assert (silent.value.status, silent.value.code) == (503, "engine_silent")
    monitor.take(Snapshot(number=1, now=1.0, gauges=Gauges()))
    monitor.take(Snapshot(number=99, now=1.0, gauges=Gauges()))


async def test_an_engine_that_answers_nobody_is_not_asked_again_and_again(monitor: RemoteMonitor, sent: Sent) -> None:
    looking = [asyncio.ensure_future(monitor.look(patience_s=60)) for _ in range(MAX_ASKED)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="does not answer"):
        await monitor.look(patience_s=60)
    assert len(sent.messages) == MAX_ASKED
    for one in looking:
        one.cancel()
    await asyncio.wait(looking)
    with pytest.raises(RequestError, match="does not answer"):
        await monitor.look(patience_s=0.01)
    assert len(sent.messages) == MAX_ASKED + 1, "who left is not counted any more"


async def test_observers_are_told_and_one_that_raises_is_told_nothing_any_more(
    monitor: RemoteMonitor, sent: Sent
) -> None:
    class Noting:
        def __init__(self, error: Exception | None = None) -> None:
            self.told: list[Any] = []
            self._error = error

        @hookimpl
        def callboard_request_finished(self, requests: Any) -> None:
            self.told += requests
            if self._error is not None:
                raise self._error

    good, bad = Noting(), Noting(ValueError())
    monitor.take(RequestsFinished(requests=()))  # to the frontend before this one
    monitor.watch(good, "tests.good")
    monitor.watch(bad, "tests.bad")
    assert sent.messages == [Subscribe()]
    one = RequestMetrics(1, Finish.STOP, 2, 3, 0, 0, 1.0, 0.1, 0.2, 0.1, 1.0, model="m", ended_at_unix_s=5.0)
    for _ in range(2):
        monitor.take(RequestsFinished(requests=(one,)))
    assert (good.told, bad.told) == ([one, one], [one])
