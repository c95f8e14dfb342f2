"""The way in: what is cancelled is not encoded any more, and a token that the model does not have is refused."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.actors.tokenizer import Tokenizer
from engine.messages import Abort, Admit, Delta, Deltas, Failed, Finish, RequestOptions, Stop, Tokenize
from engine.text.codec import EncodedChat, TextCodec
from engine.types.params import SamplingParams
from engine.types.prompt import ChatTurn
from tests.actors.test_ingress import Sent
from tests.pace import far
from tests.text.specimens import byte_level, codec

PARAMS = SamplingParams()


@asynccontextmanager
async def with_tokenizer(text_codec: TextCodec, vocab_size: int) -> AsyncIterator[tuple[Tokenizer, Sent, Sent]]:
    """A tokenizer that runs, what it sends to ingress and what it sends to the scheduler."""
    ingress, scheduler = Sent(), Sent()
    tokenizer = Tokenizer(capacity=1000, codec=text_codec, vocab_size=vocab_size)
    tokenizer.connect(scheduler=scheduler, ingress=ingress)
    running = asyncio.create_task(tokenizer.run())
    async with asyncio.timeout(far(60)):
        yield tokenizer, ingress, scheduler
        tokenizer.inbox.put(Stop())
        await running


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_prompts_that_are_cancelled_are_not_encoded_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_codec = codec(byte_level(), tmp_path)
    encode, go_on, encoded = text_codec.encode, threading.Event(), list[str]()

    def slow(text: str, **options: Any) -> Any:
        encoded.append(text)
        assert go_on.wait(far(60))
        return encode(text, **options)

    monkeypatch.setattr(text_codec, "encode", slow)
    num_threads = min(32, (os.cpu_count() or 1) + 4)  # of asyncio's own pool

    async with with_tokenizer(text_codec, text_codec.vocab_size) as (tokenizer, ingress, scheduler):
        numbers = range(1, 4 * num_threads)
        for number in numbers:
            tokenizer.inbox.put(Tokenize(request_id=number, params=PARAMS, text="long"))
        await until(lambda: len(encoded) == num_threads)
        for number in numbers:
            tokenizer.inbox.put(Abort(request_id=number))
        tokenizer.inbox.put(Tokenize(request_id=1000, params=PARAMS, text="short"))
        await until(lambda: bool(ingress.messages))
        ended = tuple(Delta(request_id=number, text="", finish=Finish.ABORT) for number in numbers)
        assert ingress.messages == [Deltas(deltas=ended)], "the engine has let go of all of them, once"
        go_on.set()
        await until(lambda: bool(scheduler.messages))
        assert [message.request_id for message in scheduler.messages] == [1000]
        assert encoded == ["long"] * num_threads + ["short"]


@pytest.mark.parametrize("kind", ["text", "turns"])
async def test_a_token_that_the_model_does_not_have_is_its_requests_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    text_codec = codec(byte_level(), tmp_path)
    known = text_codec.encode("a")
    vocab_size = int(known.max()) + 1
    unknown = np.append(known, np.int32(vocab_size))
    assert vocab_size < text_codec.vocab_size, "the tokenizer has more tokens than the model"
    prompts = {"good": known, "bad": unknown}
    monkeypatch.setattr(text_codec, "encode", lambda text, **options: prompts[text])
    monkeypatch.setattr(
        text_codec, "encode_chat", lambda turns, *options: EncodedChat(prompts[turns[0].content], "none")
    )

    async with with_tokenizer(text_codec, vocab_size) as (tokenizer, ingress, scheduler):
        for number, text in enumerate(prompts):
            turns = (ChatTurn("user", text),) if kind == "turns" else None
            tokenizer.inbox.put(
                Tokenize(request_id=number, params=PARAMS, text=text if turns is None else None, turns=turns)
            )
        await until(lambda: bool(scheduler.messages and ingress.messages))
        (admit,), (failed,) = scheduler.messages, ingress.messages
        assert isinstance(admit, Admit)
        assert admit.token_ids == known.tobytes()
        assert isinstance(failed, Failed)
        param = "messages" if kind == "turns" else "prompt"
        assert (failed.request_id, failed.status, failed.code, failed.param) == (1, 400, "unknown_token", param)
        assert f"(id {vocab_size})" in failed.message
        assert f"its token ids end at {vocab_size - 1}" in failed.message


class Content(str):
    """A text that a weak reference can point to."""


async def test_the_prompt_of_an_open_request_is_not_kept(tmp_path: Path) -> None:
    text_codec = codec(byte_level(), tmp_path)
    text_codec.encode_chat = lambda turns, *options: EncodedChat(text_codec.encode("a"), "none")  # type: ignore[method-assign]

    async with with_tokenizer(text_codec, text_codec.vocab_size) as (tokenizer, _ingress, scheduler):
        content = Content("with pictures")
        kept = weakref.ref(content)
        tokenizer.inbox.put(Tokenize(request_id=1, params=PARAMS, turns=(ChatTurn("user", content),)))
        del content
        await until(lambda: bool(scheduler.messages))
        gc.collect()
        assert 1 in tokenizer._texts
        assert kept() is None


async def test_output_of_another_engine_is_told_first_and_goes_behind_the_prompt(tmp_path: Path) -> None:
    text_codec = codec(byte_level(), tmp_path)
    old = np.asarray(text_codec.encode("def"), dtype=np.int32)

    async with with_tokenizer(text_codec, text_codec.vocab_size) as (tokenizer, ingress, scheduler):
        options = RequestOptions(resumed=old.tobytes())
        tokenizer.inbox.put(Tokenize(request_id=1, params=PARAMS, text="abc", options=options))
        await until(lambda: bool(scheduler.messages and ingress.messages))
        (admit,) = scheduler.messages
        assert (admit.num_resumed, admit.token_ids[-old.nbytes :]) == (len(old), old.tobytes())
        ((delta,),) = (message.deltas for message in ingress.messages)
        assert (delta.text, delta.token_ids, delta.resumed) == ("def", old.tobytes(), True)
        assert delta.usage is not None
        assert delta.usage.completion_tokens == len(old)


@pytest.mark.parametrize("stop, token", [(("e",), 0), ((), 1 << 20), ((), -1)])
async def test_what_cannot_be_output_to_go_on_from_is_refused(
    tmp_path: Path, stop: tuple[str, ...], token: int
) -> None:
    text_codec = codec(byte_level(), tmp_path)
    old = np.asarray(text_codec.encode("def"), dtype=np.int32) if stop else np.array([token], dtype=np.int32)

    async with with_tokenizer(text_codec, text_codec.vocab_size) as (tokenizer, ingress, scheduler):
        params = SamplingParams(stop=stop)
        tokenizer.inbox.put(
            Tokenize(request_id=1, params=params, text="abc", options=RequestOptions(resumed=old.tobytes()))
        )
        await until(lambda: bool(ingress.messages))
        assert [message.code for message in ingress.messages] == ["not_resumable"]
        assert not scheduler.messages
