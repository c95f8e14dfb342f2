"""Code that breaks over one request's text, wherever it is called: that request ends with an error, no other does."""

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.actors.tokenizer import Tokenizer
from engine.features.grammar.grammars import GrammarCache
from engine.messages import Abort, Admit, Deltas, Failed, Finish, Stop, Tokenize, Tokens
from engine.text.forms import OutputForms
from engine.types.params import Grammar, SamplingParams
from tests.actors.test_ingress import Sent
from tests.pace import far
from tests.text.specimens import byte_level, codec

BAD, GOOD = 7, 8


class Panic(BaseException):
    """As libraries in Rust raise them: not an Exception."""


FAULTS: dict[str, type[BaseException]] = {"an exception": ZeroDivisionError, "a panic": Panic}


def fault(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("planted")


def leave() -> Any:
    sys.exit("planted")


class Quitting:
    """A grammar plugin that would end the server."""

    def compile(self, grammar: Grammar) -> Any:
        leave()


GRAMMAR_ENGINES: dict[str, Callable[[], Any]] = {"grammar": fault, "grammar exits": leave, "compile exits": Quitting}


class BadStream:
    """Breaks at one of its calls; its text is the model's to make up, so any of them may come to that."""

    matched = None
    num_reasoning_tokens = 0

    def __init__(self, place: str, fault: Callable[[], Any]) -> None:
        self._place = place
        self._fault = fault

    def push(self, token_ids: list[int]) -> str:
        return self._fault() if self._place == "push" else "x"

    def finish(self) -> str:
        return self._fault() if self._place == "finish" else ""

    def take_thoughts(self) -> str:
        return self._fault() if self._place == "take_thoughts" else ""


def token(request_id: int, finish: Finish = Finish.RUNNING) -> Tokens:
    ids = np.array([request_id], dtype=np.int64).tobytes()
    return Tokens(request_ids=ids, token_ids=np.array([70], np.int32).tobytes(), finishes=bytes([finish]))


@pytest.mark.parametrize("place", ["encode", *GRAMMAR_ENGINES, "open_stream", "push", "finish", "take_thoughts"])
@pytest.mark.parametrize("kind", FAULTS)
async def test_it_ends_its_own_request_and_no_other(
    tmp_path: Path, place: str, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: object, **__: object) -> Any:
        raise FAULTS[kind]("planted")

    ingress, scheduler = Sent(), Sent()
    text_codec = codec(byte_level(), tmp_path)
    encode, open_stream = text_codec.encode, text_codec.open_stream

    def encode_bad(text: str, **options: Any) -> Any:
        return fault() if text == "bad" and place == "encode" else encode(text, **options)

    def open_bad(token_ids: Any, params: SamplingParams, **options: Any) -> Any:
        if params.seed != BAD:
            return open_stream(token_ids, params, **options)
        return fault() if place == "open_stream" else BadStream(place, fault)

    monkeypatch.setattr(text_codec, "encode", encode_bad)
    monkeypatch.setattr(text_codec, "open_stream", open_bad)
    params = SamplingParams(seed=BAD, grammar=Grammar("regex", "a") if place in GRAMMAR_ENGINES else None)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(far(10)):
            while not condition():
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.ERROR):
        tokenizer = Tokenizer(
            capacity=100,
            codec=text_codec,
            vocab_size=text_codec.vocab_size,
            forms=OutputForms(GrammarCache(GRAMMAR_ENGINES.get(place, fault))),
        )
        tokenizer.connect(scheduler=scheduler, ingress=ingress)
        running = asyncio.create_task(tokenizer.run())
        tokenizer.inbox.put(Tokenize(request_id=BAD, params=params, text="bad"))
        tokenizer.inbox.put(Tokenize(request_id=GOOD, params=SamplingParams(), text="good"))
        await until(lambda: sum(isinstance(one, Admit | Failed) for one in scheduler.messages + ingress.messages) == 2)
        for request_id in (BAD, GOOD):
            tokenizer.inbox.put(token(request_id))
            tokenizer.inbox.put(token(request_id, Finish.LENGTH))
        tokenizer.inbox.put(Stop())
        await running
    (failed,) = [message for message in ingress.messages if isinstance(message, Failed)]
    assert (failed.request_id, failed.status, failed.code) == (BAD, 500, "internal_error")
    assert "planted" not in failed.message
    where = "plugin grammar raised" if place == "compile exits" else f"request={BAD} failed in the tokenizer"
    assert where in caplog.text
    ends = [delta for sent in ingress.messages if isinstance(sent, Deltas) for delta in sent.deltas if delta.finish]
    assert [(delta.request_id, delta.finish) for delta in ends] == [(GOOD, Finish.LENGTH)]
    was_admitted = any(isinstance(message, Admit) and message.request_id == BAD for message in scheduler.messages)
    assert was_admitted == (place in ("push", "finish", "take_thoughts"))
    assert any(isinstance(message, Abort) for message in scheduler.messages) == was_admitted
