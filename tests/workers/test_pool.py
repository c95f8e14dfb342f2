"""The tokenizer pool between a scheduler and an ingress that only listen, over processes that do as they are told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine.messages import Abort, Admit, Delta, Deltas, Failed, Finish, Stop, Tokenize, Tokens
from engine.types.errors import CallboardError, EngineDied, WeightsError
from engine.types.notices import TokenizersLost, TokenizersReady
from engine.types.params import SamplingParams
from engine.workers.limits import RestartIntensity
from engine.workers.messages import WorkerAlive, WorkerReady
from engine.workers.tokenizers import TokenizerPool, TokenizerSlot
from engine.workers.wire import WireError
from engine.workers.worker import Reports, WorkerLost
from tests.actors.test_ingress import Sent
from tests.pace import far

PARAMS = SamplingParams()


class Double:
    """A process: keeps what it gets, and says what the test wants it to say."""

    def __init__(self, name: str, number: int, reports: Reports) -> None:
        self.name = name
        self.number = number
        self.reports = reports
        self.got: list[Any] = []
        self.refuses: CallboardError | None = None
        self.ended = self.killed = False

    def put(self, message: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.got.append(message)

    async def end(self) -> None:
        self.ended = True
        self.says(Deltas(deltas=(Delta(request_id=99, text="last words"),)))

    async def kill(self, *, is_stuck: bool) -> None:
        self.killed = True

    def says(self, *messages: Any) -> None:
        for message in messages:
            self.reports.received(message)

    def dies(self, reason: str = "was killed", error: CallboardError | None = None) -> None:
        self.reports.lost(WorkerLost(f"{self.name} {reason}", error))


class Stage:
    """The pool and who is around it.  started: every process so far."""

    def __init__(self, num_processes: int, max_restarts: int, silence_timeout_s: float) -> None:
        self.started: list[Double] = []
        self.scheduler, self.ingress = Sent(), Sent()
        self.pool = TokenizerPool(
            capacity=100,
            num_processes=num_processes,
            start=self._start,
            intensity=RestartIntensity(max_restarts, 100.0),
            silence_timeout_s=silence_timeout_s,
        )
        self.pool.connect(scheduler=self.scheduler, ingress=self.ingress)
        self.running = asyncio.ensure_future(self.pool.run())

    def _start(self, slot: TokenizerSlot, reports: Reports) -> Double:
        self.started.append(Double(slot.name, slot.number, reports))
        return self.started[-1]

    async def turn(self) -> None:
        """Let everything happen that can."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def put(self, *messages: Any) -> None:
        for message in messages:
            self.pool.inbox.put(message)
        await self.turn()

    async def open(self, *request_ids: int, admitted: bool = True) -> None:
        """Requests, encoded by whoever has them."""
        await self.put(*(tokenize(one) for one in request_ids))
        if admitted:
            for request_id in request_ids:
                holder = next(one for one in self.started if tokenize(request_id) in one.got)
                holder.says(Admit(request_id=request_id, token_ids=b"\0\0\0\0", params=PARAMS))


def tokenize(request_id: int) -> Tokenize:
    return Tokenize(request_id=request_id, params=PARAMS, text=f"text {request_id}")


@asynccontextmanager
async def on_stage(
    num_processes: int = 2,
    max_restarts: int = 2,
    silence_timeout_s: float = 1000.0,
    ready: bool = True,
) -> AsyncIterator[Stage]:
    """A stage; the pool must end with it, and its processes with the pool."""
    stage = Stage(num_processes, max_restarts, silence_timeout_s)
    await stage.turn()
    if ready:
        for one in list(stage.started):
            one.says(WorkerReady())
        assert stage.ingress.messages == [TokenizersReady()]
        stage.ingress.messages.clear()
    yield stage
    if not stage.running.done():
        stage.pool.inbox.put(Stop())
        await asyncio.wait_for(stage.running, far(5))
    assert all(one.killed for one in stage.started)
    assert len(asyncio.all_tasks()) == 1


async def test_requests_are_taken_once_every_process_has_loaded() -> None:
    async with on_stage(ready=False) as stage:
        stage.started[1].says(WorkerAlive(), WorkerReady())
        assert stage.ingress.messages == []
        stage.started[0].says(WorkerReady())
        assert stage.ingress.messages == [TokenizersReady()]


async def test_a_request_and_all_that_belongs_to_it_go_to_one_process_in_order() -> None:
    async with on_stage() as stage:
        even, odd = stage.started
        await stage.open(2, 3, 4)
        assert [type(one) for one in stage.scheduler.messages] == [Admit] * 3
        ids = np.array([2, 3, 4], dtype=np.int64)
        await stage.put(
            Tokens(request_ids=ids.tobytes(), token_ids=ids.astype(np.int32).tobytes(), finishes=bytes(3)),
            Failed(request_id=3, message="why"),
            Abort(request_id=2),
        )
        assert [type(one) for one in even.got] == [Tokenize, Tokenize, Tokens, Abort]
        assert [type(one) for one in odd.got] == [Tokenize, Tokens, Failed]
        assert even.got[2].request_ids == ids[[0, 2]].tobytes()
        odd.says(Deltas(deltas=(Delta(request_id=3, text="a"),)), Failed(request_id=3, message="why"))
        assert stage.ingress.messages == [
            Deltas(deltas=(Delta(request_id=3, text="a"),)),
            Failed(request_id=3, message="why"),
        ]


async def test_what_is_cancelled_is_the_schedulers_to_know_at_once_and_the_process_cannot_bring_it_back() -> None:
    async with on_stage() as stage:
        await stage.open(2)
        await stage.open(4, admitted=False)
        stage.scheduler.messages.clear()
        await stage.put(Abort(request_id=2), Abort(request_id=4), Abort(request_id=4), Abort(request_id=77))
        assert stage.scheduler.messages == [Abort(request_id=2)], "of the other one it has never heard"
        stage.started[0].says(
            Abort(request_id=2), Admit(request_id=4, token_ids=b"\0\0\0\0", params=PARAMS), Abort(request_id=4)
        )
        assert stage.scheduler.messages == [Abort(request_id=2)]
        assert stage.ingress.messages == [], "the process has them still"
        ends = Deltas(
            deltas=(
                Delta(request_id=2, text="", finish=Finish.ABORT),
                Delta(request_id=4, text="", finish=Finish.ABORT),
            )
        )
        stage.started[0].says(ends)
        assert stage.ingress.messages == [ends]
        stage.started[0].dies()
        assert stage.ingress.messages == [ends]


async def test_what_is_cancelled_when_its_process_is_lost_has_left() -> None:
    async with on_stage() as stage:
        await stage.open(2)
        await stage.open(4, admitted=False)
        stage.ingress.messages.clear()
        await stage.put(Abort(request_id=2), Abort(request_id=4))
        stage.started[0].dies()
        ends = [Deltas(deltas=(Delta(request_id=request_id, text="", finish=Finish.ABORT),)) for request_id in (2, 4)]
        assert stage.ingress.messages == ends


async def test_a_stop_string_ends_a_request_in_its_process_and_a_later_loss_is_none_of_its_business() -> None:
    async with on_stage() as stage:
        await stage.open(2, 4)
        stage.scheduler.messages.clear()
        stage.started[0].says(
            Abort(request_id=2, finish=Finish.STOP),
            Deltas(deltas=(Delta(request_id=2, text="", finish=Finish.STOP), Delta(request_id=4, text="x"))),
        )
        assert stage.scheduler.messages == [Abort(request_id=2, finish=Finish.STOP)]
        stage.ingress.messages.clear()
        stage.started[0].dies()
        assert [one.request_id for one in stage.ingress.messages] == [4]


async def test_a_lost_process_fails_its_requests_and_no_others() -> None:
    async with on_stage() as stage:
        lost, other = stage.started
        await stage.open(2, 3, 4)
        stage.scheduler.messages.clear()
        lost.dies()
        assert stage.scheduler.messages == [Abort(request_id=2), Abort(request_id=4)]
        assert [(one.request_id, one.status, one.code) for one in stage.ingress.messages] == [
            (2, 503, "tokenizer_lost"),
            (4, 503, "tokenizer_lost"),
        ]
        lost.says(
            Deltas(deltas=(Delta(request_id=2, text="from beyond"),)),
            Admit(request_id=6, token_ids=b"\0\0\0\0", params=PARAMS),
        )
        assert len(stage.ingress.messages) == 2
        assert len(stage.scheduler.messages) == 2
        await stage.turn()
        assert lost.killed
        assert stage.pool.num_restarts == 1
        # While the next one loads: new requests go to the other one, and so does all of theirs.
        again = stage.started[2]
        assert (again.number, again.name) == (0, "tokenizer0")
        await stage.open(6)
        assert other.got[-1] == tokenize(6)
        again.says(WorkerReady())
        ids = np.array([6, 8], dtype=np.int64)
        await stage.open(8)
        await stage.put(Tokens(request_ids=ids.tobytes(), token_ids=bytes(8), finishes=bytes(2)))
        assert other.got[-1].request_ids == ids[:1].tobytes()
        assert again.got[-1].request_ids == ids[1:].tobytes()
        other.says(Deltas(deltas=(Delta(request_id=6, text="", finish=Finish.STOP),)))
        assert TokenizersReady() not in stage.ingress.messages, "it was never without any"


async def test_what_was_still_being_encoded_is_encoded_elsewhere_but_only_once() -> None:
    async with on_stage() as stage:
        first, second = stage.started
        await stage.open(2, admitted=False)
        first.dies()
        assert second.got == [tokenize(2)]
        second.dies()
        assert next(one for one in stage.ingress.messages if isinstance(one, Failed)).code == "tokenizer_lost"
        assert stage.scheduler.messages == []


async def test_without_any_process_requests_wait_and_ingress_is_told() -> None:
    async with on_stage(num_processes=1) as stage:
        (lost,) = stage.started
        await stage.open(2, admitted=False)
        lost.dies("was killed by SIGKILL")
        assert stage.ingress.messages == [TokenizersLost(reason="tokenizer0 was killed by SIGKILL")]
        await stage.open(3, 5, admitted=False)
        await stage.put(Abort(request_id=3))
        again = stage.started[1]
        assert again.got == []
        again.says(WorkerReady())
        has_left = Deltas(deltas=(Delta(request_id=3, text="", finish=Finish.ABORT),))
        assert stage.ingress.messages[1:] == [has_left, TokenizersReady()], "no process has ever had it"
        assert again.got == [tokenize(2), tokenize(5)]


async def test_a_process_that_takes_nothing_is_lost() -> None:
    async with on_stage() as stage:
        await stage.open(2)
        stage.started[0].refuses = CallboardError("link tokenizer0: Tokens cannot be sent")
        await stage.put(
            Tokens(request_ids=np.array([2], dtype=np.int64).tobytes(), token_ids=bytes(4), finishes=bytes(1))
        )
        assert stage.pool.num_ready == 1
        async with asyncio.timeout(far(5)):
            while not stage.pool.num_restarts:
                await asyncio.sleep(0.01)
        assert stage.scheduler.messages[-1] == Abort(request_id=2)


async def test_a_request_that_fits_no_message_is_refused_alone() -> None:
    async with on_stage() as stage:
        stage.started[0].refuses = WireError("link tokenizer0: Tokenize of 70000000 bytes exceeds 67108864")
        await stage.put(tokenize(2))
        (failed,) = stage.ingress.messages
        assert (failed.request_id, failed.status) == (2, 400)
        assert "exceeds" in failed.message
        assert stage.pool.num_restarts == 0


async def test_a_process_that_falls_silent_is_lost_and_one_that_beats_is_not() -> None:
    async with on_stage(silence_timeout_s=0.2) as stage:
        silent, beating = stage.started
        async with asyncio.timeout(far(5)):
            while len(stage.started) == 2:
                beating.says(WorkerAlive(waiting=3, peak=9))
                await asyncio.sleep(0.005)
        assert (silent.killed, beating.killed) == (True, False)
        assert [(slot.waiting, slot.peak) for slot in stage.pool.slots] == [(0, 0), (3, 9)]


async def test_restarts_that_do_not_help_end_the_pool_with_the_reason() -> None:
    async with on_stage() as stage:
        for _ in range(3):
            stage.started[-1].dies("ended with code 1")
            await stage.turn()
        with pytest.raises(ExceptionGroup) as died:
            await stage.running
        (error,) = died.value.exceptions
        assert isinstance(error, EngineDied)
        assert str(error) == "tokenizer1 ended with code 1; 2 restarts in 100 s did not help"


@pytest.mark.parametrize("error", [WeightsError("tokenizer.json: no such file"), None])
async def test_a_first_load_that_fails_is_the_starts_own_error(error: WeightsError | None) -> None:
    async with on_stage(ready=False) as stage:
        stage.started[1].dies("ended with code 1", error)
        await stage.turn()
        with pytest.raises(ExceptionGroup) as died:
            await stage.running
        (raised,) = died.value.exceptions
        assert raised is error or str(raised) == "tokenizer1 ended with code 1 while it started"
        assert len(stage.started) == 2


async def test_what_goes_wrong_with_a_processs_word_ends_the_pool() -> None:
    async with on_stage() as stage:

        def broken(_: object) -> None:
            raise ZeroDivisionError("planted")

        stage.ingress.put = broken  # type: ignore[method-assign]
        stage.started[0].says(Deltas(deltas=(Delta(request_id=2, text=""),)))
        with pytest.raises(ExceptionGroup) as died:
            await stage.running
        assert "planted" in repr(died.value)


async def test_a_stop_lets_processes_finish_and_hears_their_last_words() -> None:
    async with on_stage() as stage:
        await stage.open(2)
    assert all(one.ended for one in stage.started)
    assert stage.ingress.messages == [Deltas(deltas=(Delta(request_id=99, text="last words"),))] * 2
