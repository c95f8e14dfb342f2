"""Ingress: every accepted request ends once; every refusal says why; a slow client costs one merged delta."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine.actors.admission import unavailable
from engine.actors.ingress import Ingress
from engine.actors.stream import Stream
from engine.messages import Abort, Delta, Deltas, Failed, Finish, RequestOptions, Tokenize, Usage
from engine.settings.sections import LimitsSection
from engine.types.errors import EngineDied, RequestError
from engine.types.notices import EngineReady, Stats
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn

USAGE = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)


class Sent:
    """A link that keeps what was put."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def put(self, message: Any) -> None:
        self.messages.append(message)


@asynccontextmanager
async def with_ingress(**limits: Any) -> AsyncIterator[tuple[Ingress, Sent]]:
    """An ingress that is ready, and what it sends."""
    sent = Sent()
    ingress = Ingress(
        capacity=100,
        limits=LimitsSection(**{"max_requests": 4, **limits}),
        max_model_len=32,
        vocab_size=100,
        rng=random.Random(0),
        tokenizer=sent,
    )
    ingress.handle(EngineReady())
    yield ingress, sent
    assert len(asyncio.all_tasks()) == 1, "a task was left behind"


def text(request_id: int, text: str, finish: Finish = Finish.RUNNING) -> Deltas:
    usage = USAGE if finish else None
    return Deltas(
        deltas=(
            Delta(
                request_id=request_id,
                text=text,
                token_ids=np.array([7], np.int32).tobytes(),
                finish=finish,
                usage=usage,
            ),
        )
    )


async def read(stream: Stream) -> list[str]:
    return [delta.text async for delta in stream]


async def test_a_stream_yields_what_comes_and_ends_with_the_finish() -> None:
    async with with_ingress() as (ingress, sent):
        stream = ingress.open("hello", SamplingParams())
        assert isinstance(sent.messages[0], Tokenize)
        assert sent.messages[0].text == "hello"
        reading = asyncio.create_task(read(stream))
        for message in (text(1, "a"), text(1, "b"), text(1, "c", Finish.STOP)):
            await asyncio.sleep(0)
            ingress.handle(message)
        assert await reading == ["a", "b", "c"]
        assert ingress.num_open == 0
        with pytest.raises(StopAsyncIteration):
            await stream.next()
        stream.close()
        assert len(sent.messages) == 1, "closing a stream that has ended cancels nothing"


async def test_what_a_slow_client_has_not_read_is_one_delta() -> None:
    async with with_ingress() as (ingress, _):
        stream = ingress.open("hello", SamplingParams())
        for piece in "abc":
            ingress.handle(text(1, piece))
        ingress.handle(text(1, "d", Finish.LENGTH))
        delta = await stream.next()
        assert (delta.text, delta.finish, delta.usage) == ("abcd", Finish.LENGTH, USAGE)
        assert np.frombuffer(delta.token_ids, np.int32).tolist() == [7, 7, 7, 7]


async def test_collect_wakes_once_and_returns_everything() -> None:
    async with with_ingress() as (ingress, _):
        stream = ingress.open("hello", SamplingParams())
        collecting = asyncio.create_task(stream.collect())
        ingress.handle(text(1, "a"))
        await asyncio.sleep(0.01)
        assert not collecting.done()
        ingress.handle(text(1, "b", Finish.STOP))
        assert (await collecting).text == "ab"


async def test_closing_early_cancels_once_and_late_output_is_dropped() -> None:
    async with with_ingress() as (ingress, sent):
        stream = ingress.open("hello", SamplingParams())
        stream.close()
        stream.close()
        assert sent.messages[1:] == [Abort(request_id=1)]
        assert ingress.num_open == 0
        ingress.handle(text(1, "late"))
        assert ingress.num_late_events == 1
        ingress.handle(text(1, "", Finish.ABORT))
        assert ingress.num_late_events == 1, "that is how the engine lets go of it"
        ingress.handle(Failed(request_id=1, message="late"))
        assert ingress.num_late_events == 2


async def test_a_failure_reaches_the_stream_after_what_came_before() -> None:
    async with with_ingress() as (ingress, _):
        stream = ingress.open("hello", SamplingParams())
        ingress.handle(text(1, "a"))
        ingress.handle(
            Failed(request_id=1, message="too long", status=400, code="context_length_exceeded", param="prompt")
        )
        assert (await stream.next()).text == "a"
        with pytest.raises(RequestError, match="too long") as failed:
            await stream.next()
        assert (failed.value.status, failed.value.code) == (400, "context_length_exceeded")
        assert ingress.num_open == 0


async def test_the_engines_death_ends_every_stream_and_refuses_new_requests() -> None:
    async with with_ingress() as (ingress, _):
        streams = [ingress.open("hello", SamplingParams()) for _ in range(3)]
        collecting = [asyncio.create_task(stream.collect()) for stream in streams]
        await asyncio.sleep(0)
        ingress.fail_all(EngineDied("executor0 crashed: ValueError: x"))
        for result in await asyncio.gather(*collecting, return_exceptions=True):
            assert isinstance(result, EngineDied)
        with pytest.raises(RequestError, match="executor0 crashed") as refused:
            ingress.open("hello", SamplingParams())
        assert refused.value.status == 503


async def test_requests_past_the_limit_get_429_and_a_place_comes_free() -> None:
    async with with_ingress() as (ingress, _):
        streams = [ingress.open("hello", SamplingParams()) for _ in range(4)]
        with pytest.raises(RequestError) as refused:
            ingress.open("hello", SamplingParams())
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "queue_full", 1)
        ingress.handle(text(1, "a", Finish.STOP))
        ingress.open("hello", SamplingParams())
        with pytest.raises(RequestError, match="4 requests are open and"):
            ingress.open("hello", SamplingParams())
        assert streams[0].ended


@pytest.mark.parametrize(
    "answer", [text(1, "", Finish.ABORT), text(1, "a", Finish.STOP), Failed(request_id=1, message="refused")]
)
async def test_a_cancelled_request_takes_its_place_until_the_engine_has_let_go_of_it(answer: Deltas | Failed) -> None:
    async with with_ingress(max_queued_tokens=32) as (ingress, sent):
        for stream in [ingress.open([1] * 8, SamplingParams()) for _ in range(4)]:
            stream.close()
        assert ingress.num_open == 0
        with pytest.raises(RequestError, match="0 requests are open, 4 cancelled ones are leaving, and no more than 4"):
            ingress.open([1], SamplingParams())
        assert len(sent.messages) == 8, "nothing is sent for what is refused"
        ingress.handle(answer)
        with pytest.raises(RequestError, match="tokens are queued"):
            ingress.open([1] * 16, SamplingParams())
        ingress.open([1] * 8, SamplingParams())


async def test_queued_prompt_tokens_are_limited_but_one_request_always_gets_in() -> None:
    async with with_ingress(max_queued_tokens=10) as (ingress, _):
        ingress.open([1] * 20, SamplingParams())
        with pytest.raises(RequestError) as refused:
            ingress.open([1], SamplingParams())
        assert refused.value.status == 429


async def test_a_request_past_its_deadline_is_cancelled_and_says_so() -> None:
    async with with_ingress(request_timeout_s=0.02) as (ingress, sent):
        stream = ingress.open("hello", SamplingParams())
        with pytest.raises(RequestError, match=r"longer than 0\.02 s") as expired:
            await stream.collect()
        assert (expired.value.status, expired.value.code) == (504, "request_timeout")
        assert sent.messages[1:] == [Abort(request_id=1)]
        stream.close()
        assert len(sent.messages) == 2


async def test_a_request_without_a_token_is_told_to_come_back_and_one_with_some_may_go_on() -> None:
    async with with_ingress(first_token_timeout_s=0.02, request_timeout_s=0.05) as (ingress, sent):
        waiting, running = (ingress.open("hello", SamplingParams()) for _ in range(2))
        ingress.handle(Deltas(deltas=(Delta(request_id=2, text="a", token_ids=b"\1\0\0\0"),)))
        with pytest.raises(RequestError, match=r"no token for 0\.02 s") as late:
            await waiting.collect()
        assert (late.value.status, late.value.code, late.value.retry_after_s) == (503, "queue_timeout", 1)
        assert sent.messages[2:] == [Abort(request_id=1)]
        assert (await running.next()).text == "a"
        with pytest.raises(RequestError, match=r"longer than 0\.05 s"):
            await running.collect()
        assert ingress.num_open == 0


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        ([], "invalid_value", "at least one token id"),
        ([100], "invalid_value", "token id 100 is outside 0 to 99"),
        ([5, -1], "invalid_value", "token id -1 is outside"),
        ([2**70], "invalid_value", "list of token ids"),
        ([1] * 33, "context_length_exceeded", "33 tokens, the context is 32"),
        ("x" * 257, "context_length_exceeded", "257 characters; at most 256"),
        ((ChatTurn("user", "x" * 257),), "context_length_exceeded", "261 characters"),
    ],
)
async def test_a_bad_prompt_is_refused_before_any_work(prompt: Any, code: str, said: str) -> None:
    async with with_ingress() as (ingress, sent):
        with pytest.raises(RequestError, match=said) as refused:
            ingress.open(prompt, SamplingParams())
        assert (refused.value.status, refused.value.code) == (400, code)
        assert not sent.messages
        assert ingress.num_open == 0


async def test_output_to_go_on_from_that_no_request_can_have_is_refused_before_any_work() -> None:
    async with with_ingress() as (ingress, sent):
        with pytest.raises(RequestError, match="has 32 tokens, the context is 32") as refused:
            ingress.open("hello", SamplingParams(), RequestOptions(resumed=bytes(4 * 32)))
        assert (refused.value.status, refused.value.code) == (400, "not_resumable")
        assert not sent.messages
        ingress.open("hello", SamplingParams(), RequestOptions(resumed=bytes(4 * 31)))


async def test_bad_sampling_parameters_are_refused_by_name() -> None:
    async with with_ingress() as (ingress, sent):
        for name, value in [("temperature", float("nan")), ("top_p", 1.5), ("min_tokens", -1), ("seed", 2**64)]:
            with pytest.raises(RequestError) as refused:
                ingress.open("hello", SamplingParams(**{name: value}))
            assert (refused.value.status, refused.value.param) == (400, name)
        assert not sent.messages


async def test_requests_without_a_seed_get_different_ones() -> None:
    async with with_ingress() as (ingress, sent):
        ingress.open("hello", SamplingParams())
        ingress.open("hello", SamplingParams())
        ingress.open("hello", SamplingParams(seed=5))
        seeds = [message.params.seed for message in sent.messages]
        assert None not in seeds
        assert seeds[0] != seeds[1]
        assert seeds[2] == 5


async def test_not_ready_and_draining_are_503_with_retry_after() -> None:
    async with with_ingress() as (ingress, _):
        ingress.ready = False
        with pytest.raises(RequestError) as loading:
            ingress.open("hello", SamplingParams())
        assert str(loading.value) == "the model is loading"
        ingress.loading = lambda: "weights, 42%"
        assert str(unavailable(ingress)) == "the model is loading: weights, 42%"
        ingress.ready, ingress.draining = True, True
        with pytest.raises(RequestError) as draining:
            ingress.open("hello", SamplingParams())
        for refused in (loading, draining):
            assert (refused.value.status, refused.value.retry_after_s) == (503, 5)


async def test_waiting_for_idle_ends_when_the_last_request_does_or_time_is_up() -> None:
    async with with_ingress() as (ingress, _):
        assert await ingress.wait_idle(0.01)
        ingress.open("hello", SamplingParams())
        assert not await ingress.wait_idle(0.01)
        ingress.handle(text(1, "", Finish.STOP))
        assert await ingress.wait_idle(0.01)


async def test_stats_are_kept_for_whoever_asks() -> None:
    async with with_ingress() as (ingress, _):
        stats = Stats(step_id=3, running=1, waiting=0, pages_free=7, pages_cached=0, pages_used=1)
        ingress.handle(stats)
        assert ingress.stats == stats
