"""Ingress for a frontend elsewhere, with doubles of its processes: who is told what, and what a lost one leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.actors.snapshot import Gauges, GetSnapshot, RequestsFinished, Snapshot, Subscribe
from engine.messages import Abort, Delta, Deltas, Failed, Finish, Stop, Tokenize
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import CallboardError, ConfigError, EngineDied
from engine.types.notices import EngineReady, EngineRecovering, Profile, Stats, TokenizersReady
from engine.types.params import SamplingParams
from engine.workers.frontend import FrontendSlot, RemoteIngress
from engine.workers.limits import RestartIntensity
from engine.workers.link import LinkError
from engine.workers.messages import (
    AbortAll,
    Drain,
    EngineFailed,
    FromFrontend,
    FrontendDrained,
    FrontendState,
    Handover,
    WorkerReady,
)
from engine.workers.wire import WireError
from engine.workers.worker import Reports, WorkerLost
from tests.actors.test_ingress import Sent
from tests.pace import far

READY = EngineReady()
STATS = Stats(step_id=3, running=1, waiting=0, pages_free=4, pages_cached=2, pages_used=2)
FINISHED = RequestMetrics(1, Finish.STOP, 2, 3, 0, 0, 1.0, 0.1, 0.2, 0.1, 1.0)


class Double:
    """A frontend: keeps what it gets, and says what the test wants it to say."""

    def __init__(self, handover: Handover, reports: Reports[FromFrontend]) -> None:
        self.handover = handover
        self.reports = reports
        self.got: list[Any] = []
        self.most_deltas = 1000
        self.refuses: CallboardError | None = None
        self.ended = self.killed = False

    def put(self, message: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        if isinstance(message, Deltas) and len(message.deltas) > self.most_deltas:
            raise WireError("too large")
        self.got.append(message)

    async def end(self) -> None:
        self.ended = True

    async def kill(self, *, is_stuck: bool) -> None:
        self.killed = True

    def says(self, *messages: FromFrontend) -> None:
        for message in messages:
            self.reports.received(message)

    def dies(self, error: CallboardError | None = None) -> None:
        self.reports.lost(WorkerLost("frontend was killed", error))


class Stage:
    """The ingress and who is around it.  started: every frontend so far."""

    def __init__(self, max_restarts: int, silence_timeout_s: float, has_tokenizers: bool) -> None:
        self.started: list[Double] = []
        self.tokenizer = Sent()
        self.watching: list[Any] = []
        self.ingress = RemoteIngress(
            capacity=100,
            tokenizer=self.tokenizer,
            start=self._start,
            intensity=RestartIntensity(max_restarts, 1000.0),
            silence_timeout_s=silence_timeout_s,
            parts=("executors", "tokenizers") if has_tokenizers else ("executors",),
        )
        self.ingress.about = b"about"
        self.profiles: list[Profile] = []
        self.ingress.connect(
            look=self._look,
            watch=lambda observer, name: self.watching.append(observer),
            profile=self.profiles.append,
        )
        self.running = asyncio.ensure_future(self.ingress.run())

    def _start(self, slot: FrontendSlot, reports: Reports[FromFrontend], handover: Handover) -> Double:
        assert slot.name == "frontend"
        self.started.append(Double(handover, reports))
        return self.started[-1]

    def _look(self, ask: GetSnapshot) -> Snapshot:
        return Snapshot(number=ask.number, now=1.0, gauges=Gauges(num_open=self.ingress.num_open))

    @property
    def frontend(self) -> Double:
        """The one that is there."""
        return self.started[-1]

    async def turn(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Wait for the ingress's end.  Raises what it ended with."""
        try:
            await asyncio.wait_for(self.running, far(5))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def put(self, *messages: Any) -> None:
        for message in messages:
            self.ingress.inbox.put(message)
        await self.turn()


def tokenize(request_id: int) -> Tokenize:
    return Tokenize(request_id=request_id, params=SamplingParams(), text=f"text {request_id}")


def deltas(*request_ids: int, finish: Finish = Finish.RUNNING) -> Deltas:
    return Deltas(deltas=tuple(Delta(request_id=one, text="x", finish=finish) for one in request_ids))


@asynccontextmanager
async def on_stage(
    *,
    max_restarts: int = 2,
    silence_timeout_s: float = 1000.0,
    has_tokenizers: bool = False,
    ready: bool = True,
) -> AsyncIterator[Stage]:
    """A stage; the ingress must end with it, and its frontend with the ingress."""
    stage = Stage(max_restarts, silence_timeout_s, has_tokenizers)
    await stage.turn()
    if ready:
        stage.frontend.says(WorkerReady())
        await stage.put(READY)
        stage.frontend.got.clear()
    yield stage
    if not stage.running.done():
        stage.ingress.inbox.put(Stop())
        await asyncio.wait_for(stage.running, far(5))
    assert all(one.killed for one in stage.started)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("last", ["frontend", "executors", "tokenizers"])
async def test_it_is_ready_once_the_front_and_every_part_are(last: str) -> None:
    async with on_stage(has_tokenizers=True, ready=False) as stage:
        comes = {
            "frontend": lambda: stage.frontend.says(WorkerReady()),
            "executors": lambda: stage.ingress.inbox.put(READY),
            "tokenizers": lambda: stage.ingress.inbox.put(TokenizersReady()),
        }
        for part in [one for one in comes if one != last]:
            comes[part]()
            await stage.turn()
        assert not stage.ingress.became_ready.is_set()
        comes[last]()
        await stage.turn()
        assert stage.ingress.became_ready.is_set()
        assert {READY, TokenizersReady()} <= set(stage.frontend.got), "whenever it came, it was told"


async def test_requests_go_one_way_and_what_comes_of_them_the_other() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1), tokenize(2), tokenize(3), tokenize(4))
        assert (stage.tokenizer.messages, stage.ingress.num_open) == ([tokenize(one) for one in (1, 2, 3, 4)], 4)
        said = (deltas(1, 2), deltas(1, finish=Finish.STOP), Failed(request_id=2, message="why"), STATS)
        await stage.put(*said)
        assert (stage.frontend.got, stage.ingress.num_open) == (list(said), 2)
        stage.frontend.says(Abort(request_id=1), Abort(request_id=3))  # the first one has crossed its request's end
        assert (stage.tokenizer.messages[4:], stage.ingress.num_open) == ([Abort(request_id=3)], 1)


async def test_the_next_front_knows_what_the_lost_one_knew_and_nobody_owns_its_requests() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1), tokenize(7), tokenize(3), FrontendState(state=b"kept"))
        await stage.put(STATS, deltas(3, finish=Finish.STOP), EngineRecovering(reason="why"))
        stage.frontend.dies()
        assert stage.tokenizer.messages[3:] == [Abort(request_id=1), Abort(request_id=7)]
        assert (stage.ingress.num_open, stage.ingress.num_restarts) == (0, 0)
        await stage.put(deltas(1, 7))  # on its way before
        assert (len(stage.started), stage.ingress.num_restarts) == (2, 1)
        first, second = (one.handover for one in stage.started)
        assert first == Handover(first_id=1, replay=(), about=b"about", state=b"")
        assert second == Handover(
            first_id=8, replay=(READY, EngineRecovering(reason="why"), STATS), about=b"about", state=b"kept"
        )
        assert stage.frontend.got == []
        await stage.put(READY)  # while it loads
        stage.frontend.says(WorkerReady())
        assert stage.frontend.got == [READY, STATS]
        assert not stage.ingress.recovering


async def test_a_front_that_takes_nothing_is_lost() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1))
        stage.frontend.refuses = LinkError("full")
        await stage.put(deltas(1), deltas(1))
        async with asyncio.timeout(far(5)):
            while len(stage.started) < 2:
                await asyncio.sleep(0.01)
        assert stage.tokenizer.messages[1:] == [Abort(request_id=1)]


async def test_a_front_that_says_nothing_hangs() -> None:
    async with on_stage(silence_timeout_s=0.1) as stage:
        stage.frontend.says(tokenize(1))
        async with asyncio.timeout(far(5)):
            while len(stage.started) < 2:
                await asyncio.sleep(0.01)
        assert stage.started[0].killed
        assert stage.tokenizer.messages[1:] == [Abort(request_id=1)]


async def test_output_that_is_too_large_is_cut_and_what_cannot_be_is_one_requests_end() -> None:
    async with on_stage() as stage:
        stage.frontend.says(*map(tokenize, range(1, 6)))
        stage.frontend.most_deltas = 2
        await stage.put(deltas(1, 2, 3, 4, 5))
        assert [one.request_id for message in stage.frontend.got for one in message.deltas] == [1, 2, 3, 4, 5]
        stage.frontend.got.clear()
        stage.frontend.most_deltas = 0
        await stage.put(deltas(2))
        (failed,) = stage.frontend.got
        assert (failed.request_id, failed.status, failed.code) == (2, 413, "output_too_large")
        assert (stage.tokenizer.messages[5:], stage.ingress.num_open) == ([Abort(request_id=2)], 4)


async def test_draining_waits_for_the_word_that_no_more_comes_and_for_what_is_open() -> None:
    async with on_stage() as stage:
        stage.ingress.drain()
        assert stage.frontend.got == [Drain()]
        waiting = asyncio.ensure_future(stage.ingress.wait_idle(5))
        await stage.turn()
        assert not waiting.done(), "something may be on its way"
        stage.frontend.says(tokenize(1), tokenize(2))  # sent before it heard of the drain
        await stage.put(deltas(1, finish=Finish.STOP))
        stage.frontend.says(FrontendDrained())
        await stage.turn()
        assert not waiting.done()
        await stage.put(deltas(2, finish=Finish.STOP))
        assert await waiting
        assert await stage.ingress.wait_idle(0)


async def test_what_is_open_when_time_is_up_is_aborted_on_both_sides() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1))
        stage.ingress.drain()
        stage.frontend.says(FrontendDrained())
        assert not await stage.ingress.wait_idle(0.01)
        stage.ingress.abort_all()
        assert stage.frontend.got == [Drain(), AbortAll()]
        assert stage.tokenizer.messages[1:] == [Abort(request_id=1)]
        stage.frontend.says(Abort(request_id=1))  # its own, of the same request
        assert (stage.tokenizer.messages[1:], await stage.ingress.wait_idle(0)) == ([Abort(request_id=1)], True)


async def test_a_front_that_is_lost_while_it_drains_is_not_missed() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1))
        stage.ingress.drain()
        stage.frontend.dies()
        assert await stage.ingress.wait_idle(5)
        await stage.ingress.leave()
        assert len(stage.started) == 1
        assert stage.tokenizer.messages[1:] == [Abort(request_id=1)]


async def test_one_that_came_while_the_engine_drains_is_told_so() -> None:
    async with on_stage() as stage:
        stage.frontend.dies()
        await stage.turn()
        stage.ingress.drain()
        assert await stage.ingress.wait_idle(0), "there is nobody to wait for"
        stage.frontend.says(WorkerReady())
        assert stage.frontend.got == [READY, Drain()]


async def test_a_crashed_engine_is_told_to_clients_although_its_actors_have_ended() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1))
        stage.running.cancel()
        await asyncio.wait((stage.running,))
        assert not stage.frontend.killed
        stage.ingress.fail_all(EngineDied("scheduler crashed"))
        await stage.turn()
        assert stage.frontend.killed, "and that was its end"
        assert (stage.frontend.got, stage.frontend.ended) == ([EngineFailed(reason="scheduler crashed")], True)
        assert stage.ingress.num_open == 0


async def test_a_first_front_that_fails_says_why_and_is_not_tried_again() -> None:
    async with on_stage(ready=False) as stage:
        stage.frontend.dies(ConfigError("server.traces needs OpenTelemetry"))
        with pytest.raises(ConfigError, match="OpenTelemetry"):
            await stage.end()
        assert len(stage.started) == 1


@pytest.mark.parametrize(
    ("max_restarts", "said"), [(2, "2 restarts in 1000 s did not help"), (0, "placement.max_restarts is 0")]
)
async def test_restarts_end_somewhere(max_restarts: int, said: str) -> None:
    async with on_stage(max_restarts=max_restarts) as stage:
        for _ in range(max_restarts + 1):
            stage.frontend.dies()
            await stage.turn()
        with pytest.raises(EngineDied, match=f"frontend was killed; {said}"):
            await stage.end()
        assert stage.ingress.num_restarts == max_restarts


async def test_who_asks_is_answered_and_who_follows_is_told_once_for_all_fronts() -> None:
    async with on_stage() as stage:
        stage.frontend.says(tokenize(1), GetSnapshot(number=5), Subscribe(), Profile(num_steps=3, folder="here"))
        assert stage.profiles == [Profile(num_steps=3, folder="here")]
        assert stage.frontend.got == [Snapshot(number=5, now=1.0, gauges=Gauges(num_open=1))]
        stage.frontend.dies()
        await stage.turn()
        stage.frontend.says(WorkerReady(), Subscribe())
        (follower,) = stage.watching
        follower.callboard_request_finished([FINISHED])
        assert stage.frontend.got[-1] == RequestsFinished(requests=(FINISHED,))


async def test_a_bug_in_handling_what_the_front_says_ends_the_actor() -> None:
    async with on_stage() as stage:

        def broken(message: Any) -> None:
            raise RuntimeError("no room")

        stage.tokenizer.put = broken  # type: ignore[method-assign]
        stage.frontend.says(tokenize(1))
        with pytest.raises(RuntimeError, match="no room"):
            await stage.end()
        await stage.ingress.leave()
