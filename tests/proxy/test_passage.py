"""What a router passes on of a marked stream, and what it remembers of it, however the bytes come."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from server.http.body import ROUTED_TYPE
from server.http.sse import PING_COMMENT, PING_EVENT
from server.proxy.passage import Passage, WrongMark
from tests.server.live_server import MODEL, LiveServer

STREAM = (
    b"data: a\n\n: 0 01000000 0 5 1\n\nevent: x\ndata: b\n\ndata: c\n\n: 1 0200000003000000 2 0 2\n\n"
    b": 0  0 0 0\n\ndata: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_events_and_what_they_tell_go_together(size: int) -> None:
    passage, told = Passage(b"{}"), b""
    for at in range(0, len(STREAM), size):
        new = passage.take(STREAM[at : at + size])
        told += new
        # What was passed on is never more, nor less, than what is known of it.
        assert passage.num_tokens == told.count(b"data: a") + 2 * told.count(b"data: c")
    assert told == b"data: a\n\nevent: x\ndata: b\n\ndata: c\n\n"
    assert (passage.num_prompt_tokens, passage.num_tokens, passage.has_begun) == (5, 3, True)
    assert passage.rest() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("ping", [PING_COMMENT, PING_EVENT])
def test_a_ping_goes_further_at_once_and_says_nothing_of_tokens(ping: bytes) -> None:
    passage = Passage(b"{}")
    assert passage.take(ping) == ping
    assert not passage.has_begun
    assert passage.take(b"data: a\n\n: 0 01000000 0 5 1\n\n" + ping) == b"data: a\n\n" + ping
    assert (passage.num_tokens, passage.rest()) == (1, b"")


def test_what_was_held_back_comes_again_from_the_next_replica() -> None:
    passage = Passage(b"{}")
    assert passage.take(b"data: a\n\n: 0 01000000 0 5 1\n\ndata: b\n\n: 0 02") == b"data: a\n\n"
    passage.pieces()
    assert passage.take(b"data: b\n\n: 0 02000000 0 0 1\n\n") == b"data: b\n\n"
    assert passage.num_tokens == 2


@pytest.mark.parametrize(
    "wrong",
    [b"", b"0 01", b"x 01000000 0 0 1", b"0 010000 0 0 1", b"0 \xff 0 0 1", b"0 01000000 0 0 1 1", b"0  -1 0 1"],
)
def test_a_mark_that_no_replica_makes_is_refused_once_what_comes_before_is_told(wrong: bytes) -> None:
    for ends in (True, False):
        passage = Passage(b"{}")
        told = passage.take(b"data: a\n\n: 0 01000000 0 5 1\n\ndata: b\n\n: " + wrong + b"\n\n")
        assert (told, passage.num_tokens) == (b"data: a\n\n", 1)
        with pytest.raises(WrongMark, match="is no mark"):
            passage.rest() if ends else passage.take(b"data: c\n\n")
        assert passage.num_tokens == 1
        passage.pieces()
        assert passage.take(b"data: b\n\n: 0 02000000 0 0 1\n\n") == b"data: b\n\n"


def test_what_was_aborted_does_not_go_on() -> None:
    passage = Passage(b"{}")
    passage.take(b"data: a\n\n: 0 01000000 3 5 1\n\n")
    assert passage.was_aborted


def sent(live: LiveServer, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{live.url}/v1/completions", body, {"Content-Type": ROUTED_TYPE})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_what_a_router_sends_is_read_and_what_none_would_send_is_refused() -> None:
    request = {"model": MODEL, "prompt": "p", "max_tokens": 3}
    with LiveServer() as live:
        passage = Passage(json.dumps(request).encode())
        status, answer = sent(live, b"".join(passage.pieces()))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        origin = json.loads(b"".join(passage.pieces()))["origin"]
        assert live.call(lambda: live.ingress.asked[-1][1].seed) == origin["seed"]
        assert answer["id"].endswith(origin["key"].replace("-", ""))
        for wrong in (
            {"seed": -1},
            {"seed": 1 << 64},
            {"key": "x"},
            {"told": {"0": {"tokens": "AAA="}}},
            {"told": {"x": {"tokens": ""}}},
        ):
            status, answer = sent(live, json.dumps({"request": request, "origin": {**origin, **wrong}}).encode())
            assert (status, answer["error"]["code"]) == (400, "malformed_json"), wrong
        long = json.dumps({"request": {**request, "prompt": "p" * (5 << 20)}, "origin": origin}).encode()
        assert sent(live, long)[0] == 413  # more room is for what the router adds
        for deep in ('{"request": %s, "origin": {}}', '{"request": {}, "origin": {"deep": %s}}'):
            assert sent(live, (deep % ("[" * 100_000 + "]" * 100_000)).encode())[0] == 400
        for body in (b"", b"{", b"{}", json.dumps({"request": request}).encode()):
            assert sent(live, body)[0] == 400
