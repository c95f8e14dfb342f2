"""Bugs that other engines have had, one test each: they must never be ours.

What concerns kernels, ranks and benchmarks is tested beside those: a vocabulary or key heads that do not divide by the
number of ranks in ``tests/models/test_tensor_parallel.py``.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.actors.stream import merged
from engine.actors.tokenizer import Tokenizer
from engine.messages import Abort, Admit, Delta, Finish, Stop, Tokenize, Tokens
from engine.types.errors import RequestError
from engine.types.params import SamplingParams
from server.http.sse import EventStream
from server.openai.answers import CompletionChoice
from tests.actors.test_ingress import Sent
from tests.scheduling.bench import Bench, prompt_of
from tests.scheduling.fake_device import expected_output
from tests.text.specimens import byte_level, codec


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_second_of_two_identical_prompts_does_not_read_pages_that_dedup_has_freed(
    depth: int, page_size: int
) -> None:
    bench = Bench(depth=depth, page_size=page_size, num_pages=64 // page_size)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(13), max_tokens=12, ignore_eos=True)
    bench.plan()
    bench.deliver()
    # What dedup has freed is written to by a third request while the two go on.
    bench.submit(3, prompt_of(13, seed=3), max_tokens=12, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_abort_beside_a_batch_in_flight_frees_pages_and_row_once(steps_in_flight: int) -> None:
    bench = Bench(depth=2, max_running=2)
    for request_id in (1, 2):
        bench.submit(request_id, prompt_of(9, seed=request_id), max_tokens=20, ignore_eos=True)
    bench.step()
    while bench.planner.num_in_flight < steps_in_flight:
        bench.plan()
    bench.planner.abort(1)
    bench.planner.abort(1)
    bench.submit(3, prompt_of(9, seed=3), max_tokens=20, ignore_eos=True)
    bench.finish()
    assert bench.ends[1] == [Finish.ABORT]
    assert (bench.streams[2], bench.streams[3]) == (bench.expected[2], bench.expected[3])
    assert bench.planner.table.num_free == 2


def test_a_late_token_of_an_ended_request_does_not_land_in_the_prompt_of_the_rows_next_one() -> None:
    """R ends by EOS in step N-1 while step N still contains it; its row goes to S, and S's prompt to the cache."""
    bench = Bench(depth=2, max_running=1, page_size=1)
    stop = expected_output(prompt_of(5), 3)[2]
    bench.submit(1, prompt_of(5), max_tokens=50, stop_token_ids=(stop,))
    bench.submit(2, prompt_of(8, seed=5), max_tokens=5, ignore_eos=True)
    bench.finish()
    bench.submit(3, prompt_of(8, seed=5), max_tokens=5, ignore_eos=True)
    bench.finish()
    assert bench.cached[3] == 7, "it reads what S has left in the cache"
    assert bench.streams == bench.expected


@pytest.mark.parametrize(("length", "max_tokens"), [(0, 5), (200, 5), (128, 1), (5, 200)])
def test_a_prompt_that_is_empty_or_too_long_is_refused_and_nobody_waits_for_ever(length: int, max_tokens: int) -> None:
    bench = Bench()
    with pytest.raises(RequestError) as refused:
        bench.submit(1, prompt_of(length), max_tokens=max_tokens)
    assert refused.value.status == 400
    assert bench.planner.num_open == 0


@pytest.mark.parametrize("max_tokens", [-1, 0])
def test_a_negative_max_tokens_is_refused(max_tokens: int) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens).check(vocab_size=100)


def test_admission_counts_pages_and_not_tokens() -> None:
    """Four requests of 17 tokens are 68 tokens and 8 pages of 16: only three fit at once into 7."""
    bench = Bench(depth=1, page_size=16, num_pages=7, max_len=64)
    for request_id in range(4):
        bench.submit(request_id, prompt_of(17, seed=request_id), max_tokens=3, ignore_eos=True)
    bench.finish()
    assert bench.streams == bench.expected


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_preempted_request_finds_its_own_published_pages_and_goes_on(page_size: int) -> None:
    bench = Bench(page_size=page_size, num_pages=80 // page_size, max_len=48)
    bench.expect_short_outputs()
    for request_id in (1, 2, 3):
        bench.submit(request_id, prompt_of(7, seed=request_id), max_tokens=35, ignore_eos=True)
    bench.finish()
    assert bench.planner.meter.num_retractions > 0
    assert bench.streams == bench.expected


def test_one_sequence_that_grows_to_the_size_of_the_pool_ends_there() -> None:
    bench = Bench(page_size=4, num_pages=8, max_len=128)
    bench.submit(1, prompt_of(5), max_tokens=None, ignore_eos=True)
    bench.finish()
    assert bench.ends[1] == [Finish.LENGTH]
    assert bench.streams[1] == bench.expected[1][: 8 * 4 + 1 - 5], "the last token needs no slot"


@asynccontextmanager
async def with_tokenizer(root: Path) -> AsyncIterator[tuple[Tokenizer, Sent, Sent]]:
    """A tokenizer that runs, what it sends to ingress and what it sends to the scheduler."""
    ingress, scheduler = Sent(), Sent()
    text_codec = codec(byte_level(), root)
    tokenizer = Tokenizer(capacity=100, codec=text_codec, vocab_size=text_codec.vocab_size)
    tokenizer.connect(scheduler=scheduler, ingress=ingress)
    running = asyncio.create_task(tokenizer.run())
    yield tokenizer, ingress, scheduler
    tokenizer.inbox.put(Stop())
    await running


def said(ingress: Sent) -> str:
    """All text that came."""
    return "".join(delta.text for deltas in ingress.messages for delta in deltas.deltas)


async def opened(tokenizer: Tokenizer, scheduler: Sent, request_id: int) -> None:
    tokenizer.inbox.put(
        Tokenize(request_id=request_id, params=SamplingParams(), token_ids=np.array([5], np.int32).tobytes())
    )
    while not any(isinstance(message, Admit) and message.request_id == request_id for message in scheduler.messages):
        await asyncio.sleep(0)


def token(request_id: int, token_id: int, finish: Finish = Finish.RUNNING) -> Tokens:
    ids = np.array([request_id], dtype=np.int64).tobytes()
    return Tokens(request_ids=ids, token_ids=np.array([token_id], np.int32).tobytes(), finishes=bytes([finish]))


async def test_half_a_character_of_an_aborted_request_does_not_reach_another(tmp_path: Path) -> None:
    first_byte, letter = byte_level().token_to_id("\u00e4"), byte_level().token_to_id("x")  # 0xE4 begins three bytes

    async with with_tokenizer(tmp_path) as (tokenizer, ingress, scheduler):
        await opened(tokenizer, scheduler, 1)
        tokenizer.inbox.put(token(1, first_byte))
        tokenizer.inbox.put(Abort(request_id=1))
        await opened(tokenizer, scheduler, 2)
        tokenizer.inbox.put(token(2, letter, Finish.LENGTH))
        tokenizer.inbox.put(token(1, letter))  # late
    assert said(ingress) == "x"


async def test_an_incomplete_character_at_the_end_is_not_dropped(tmp_path: Path) -> None:
    first_byte, letter = byte_level().token_to_id("\u00e4"), byte_level().token_to_id("x")

    async with with_tokenizer(tmp_path) as (tokenizer, ingress, scheduler):
        await opened(tokenizer, scheduler, 1)
        tokenizer.inbox.put(token(1, letter))
        tokenizer.inbox.put(token(1, first_byte, Finish.LENGTH))
    assert said(ingress) == "x\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["a\nb", "a\n\nb", "\r\n\r\n", "data: [DONE]\n\n", "a\u2028b\u0085c"])
async def test_line_breaks_in_a_text_do_not_break_the_event_stream(text: str) -> None:
    sent: list[bytes] = []

    class Kept(EventStream):
        def __init__(self) -> None:
            self._framing = "data"
            self._encoder = msgspec.json.Encoder()

        async def _write(self, data: bytes) -> None:
            sent.append(data)

    await Kept().send([CompletionChoice(0, text, None, None)])
    ((event, rest),) = [one.split(b"\n\n", 1) for one in sent]
    assert rest == b""
    assert not set(event) & set(b"\r\n")
    assert json.loads(event.removeprefix(b"data: "))["text"] == text


def test_a_streams_tokens_are_counted_by_tokens_and_not_by_chunks() -> None:
    """A role chunk and a final empty one are no tokens, and a slow client gets several tokens in one."""
    ids = [np.array([number], np.int32).tobytes() for number in range(3)]
    deltas = [
        Delta(request_id=1, text="a", token_ids=ids[0]),
        Delta(request_id=1, text="", token_ids=ids[1]),
        Delta(request_id=1, text="b", token_ids=ids[2]),
        Delta(request_id=1, text="", token_ids=b"", finish=Finish.STOP),
    ]
    assert len(merged(deltas).token_ids) // 4 == 3
