"""Events put together from parts are byte for byte what encoding them whole would give."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from engine.messages import Delta, Finish, Usage
from engine.types.logprobs import TokenLogprobs, TokenText
from server.generate.output import PlainText, UsageCounter, is_plain
from server.openai.chat import Chat
from server.openai.completions import CompletionsEndpoint
from server.openai.translator import Translator
from server.openai.writer import StreamState
from tests.server.live_server import CARD

HEAD = {"id": 'cmpl-"odd\\', "created": 1, "model": "a/model δ"}
TOKEN = TokenText(token_id=1, text="x", utf8=b"x", logprob=-1.0)


def endpoints() -> list[Any]:
    translator = Translator(CARD)
    return [CompletionsEndpoint(translator), Chat(translator)]


def renderer(endpoint: Any, index: int, usage: Any, **fields: object):
    prompt = (
        {"prompt": "p"}
        if isinstance(endpoint, CompletionsEndpoint)
        else {"messages": [{"role": "user", "content": "p"}]}
    )
    body = msgspec.convert({"model": CARD.name, "stream": True, **prompt, **fields}, endpoint.body_type)
    generation = endpoint.translate(body)
    writer = endpoint.writer(body, generation, UsageCounter(generation))
    writer.head |= HEAD
    state = StreamState(index)
    writer.chunks(state, Delta(request_id=1, text="first", token_ids=b"\1\0\0\0"), usage)  # what a choice opens with
    return lambda delta: writer.chunks(state, delta, usage)


@given(text=st.text(), index=st.integers(0, 127), kind=st.integers(0, 1), usage=st.sampled_from([None, UNSET]))
def test_an_event_from_parts_is_the_event(text: str, index: int, kind: int, usage: Any) -> None:
    render = renderer(endpoints()[kind], index, usage)
    template = PlainText.like(render)
    assert template is not None
    delta = Delta(request_id=1, text=text, token_ids=b"\7\0\0\0")
    assert is_plain(delta)
    (event,) = render(delta)
    assert template.event(delta) == b"data: " + msgspec.json.encode(event) + b"\n\n"


@pytest.mark.parametrize(
    "delta",
    [
        Delta(request_id=1, text="a prompt that is echoed"),
        Delta(request_id=1, text="x", token_ids=b"\7\0\0\0", finish=Finish.STOP),
        Delta(request_id=1, text="x", token_ids=b"\7\0\0\0", reasoning="hm"),
        Delta(request_id=1, text="x", token_ids=b"\7\0\0\0", logprobs=(TokenLogprobs(sampled=TOKEN, top=()),)),
        Delta(request_id=1, text="x", token_ids=b"\7\0\0\0", prompt_logprobs=(TokenLogprobs(sampled=TOKEN, top=()),)),
        Delta(
            request_id=1,
            text="",
            token_ids=b"",
            finish=Finish.LENGTH,
            usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
        ),
    ],
)
def test_what_says_more_is_not_plain(delta: Delta) -> None:
    assert not is_plain(delta)


@pytest.mark.parametrize("kind", [0, 1])
def test_where_tokens_are_told_by_their_ids_no_two_events_are_alike(kind: int) -> None:
    assert PlainText.like(renderer(endpoints()[kind], 0, UNSET, return_token_ids=True)) is None


def test_an_endpoint_that_says_nothing_of_a_text_or_too_much_has_no_template() -> None:
    events = renderer(endpoints()[0], 0, UNSET)
    assert PlainText.like(lambda delta: []) is None
    assert PlainText.like(lambda delta: [*events(delta), *events(delta)]) is None
    assert PlainText.like(lambda delta: events(Delta(request_id=1, text="other", token_ids=b"\1\0\0\0"))) is None
