"""Every field of ``Delta`` reaches the client: merged with others, in a whole answer, never taken for plain text."""

from typing import Any

import msgspec
import pytest

from engine.actors.stream import merged
from engine.messages import Delta, Finish, Usage
from engine.types.logprobs import TokenLogprobs, TokenText
from server.generate.output import Output, is_plain

ENTRY = TokenLogprobs(sampled=TokenText(token_id=1, text="x", utf8=b"x", logprob=-1.0), top=())
SAMPLES: dict[str, Any] = {
    "text": "x",
    "token_ids": b"\7\0\0\0",
    "finish": Finish.STOP,
    "stop_reason": 0,
    "usage": Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    "logprobs": (ENTRY,),
    "reasoning": "hm",
    "prompt_logprobs": (ENTRY, ENTRY),
    "result": b"\0\0\0\0",
    "prompt_token_ids": b"\1\0\0\0\2\0\0\0",
    "resumed": True,
}
FIELDS = [field.name for field in msgspec.structs.fields(Delta) if field.name != "request_id"]
PIECE = Delta(request_id=1, text="a", token_ids=b"\3\0\0\0")


def with_field(name: str) -> Delta:
    return msgspec.structs.replace(PIECE, **{name: SAMPLES[name]})


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("at", [0, 1])
def test_a_field_of_either_delta_is_in_the_merged_one_and_in_the_whole_output(name: str, at: int) -> None:
    deltas = [PIECE, PIECE]
    deltas[at] = with_field(name)
    output = Output(0)
    for delta in deltas:
        output.add(delta)
    empty = getattr(Delta(request_id=1), name)
    parts = [getattr(delta, name) for delta in deltas]
    expected = parts[0] + parts[1] if isinstance(empty, str | bytes | tuple) else SAMPLES[name]
    for one in (merged(deltas), output.delta):
        assert getattr(one, name) == expected
        for other in set(FIELDS) - {name}:
            assert getattr(one, other) == getattr(merged([PIECE, PIECE]), other)


def test_of_what_cannot_be_joined_the_last_counts() -> None:
    first, last = (
        Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0),
        Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0),
    )
    assert merged([Delta(request_id=1, usage=first), Delta(request_id=1, usage=last), PIECE]).usage == last


@pytest.mark.parametrize("name", FIELDS)
def test_a_delta_that_has_more_than_a_text_and_tokens_is_not_plain(name: str) -> None:
    assert is_plain(with_field(name)) == (name in {"text", "token_ids"})
