"""Streams with nothing to send: pings keep their connections, and change nothing of what the events say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Delta, Finish
from engine.settings.sections import ServerSection, StorageSection
from server.http.sse import PING_COMMENT, PING_EVENT
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, Reply, http_bytes
from tests.server.live_server import MODEL, LiveServer

TURNS = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
    "/generate": {"text": "hello"},
}
OFTEN = ServerSection(ping_after_s=0.02)


def waiting(**options: Any) -> LiveServer:
    """A server whose engine says nothing by itself."""
    return LiveServer(FakeIngress(delay_s=3600.0), **options)


def ping_of(path: str) -> bytes:
    return PING_EVENT if path == "/v1/messages" else PING_COMMENT


def answered(live: LiveServer, path: str, then: Callable[[], object], num_pings: int) -> Reply:
    """The answer to a request that waits for so many pings, and then for what ``then`` does."""
    body = json.dumps({"model": MODEL, "stream": True, **ASKED[path]}).encode()
    with RawClient(live.port) as client:
        client.send(http_bytes("POST", path, body, {"Connection": "close"}))
        head, begun = b"", b""
        if num_pings:
            head = client.read_until(b"\r\n\r\n")
            for _ in range(num_pings):
                begun += client.read_until(ping_of(path) + b"\r\n")
        else:
            assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        client.unread(head + begun)
        live.call(then)
        return client.read_reply()


def say(live: LiveServer) -> Callable[[], None]:
    return lambda: live.ingress.opened[-1].push(
        Delta(request_id=1, text="late", token_ids=b"\1\0\0\0", finish=Finish.STOP)
    )


def kinds(events: bytes) -> list[list[str]]:
    """Each event without its values."""
    return [sorted(json.loads(one.partition(b"data: ")[2])) for one in events.split(b"\n\n") if b"{" in one]


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_waits_sends_pings_and_then_says_the_same(path: str) -> None:
    with waiting(server=OFTEN) as live, waiting() as silent:
        pinged, whole = (answered(one, path, say(one), num_pings) for one, num_pings in ((live, 3), (silent, 0)))
    assert (pinged.status, whole.status) == (200, 200)
    assert pinged.body.startswith(ping_of(path) * 3)
    assert ping_of(path) not in whole.body
    assert kinds(pinged.body.replace(ping_of(path), b"")) == kinds(whole.body)
    assert b"late" in pinged.body


def test_an_error_has_its_status_before_the_first_ping_and_is_an_event_after_it() -> None:
    with waiting(server=OFTEN) as live, waiting() as silent:
        late = answered(live, "/v1/completions", live.ingress.abort_all, 1)
        early = answered(silent, "/v1/completions", silent.ingress.abort_all, 0)
    assert (early.status, early.error["code"]) == (503, "shutting_down")
    assert late.status == 200
    *pings, error, done, rest = late.body.split(b"\n\n")
    assert set(pings) == {b": ping"}
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert (done, rest) == (b"data: [DONE]", b"")


def test_pings_of_a_journaled_stream_have_no_ids(tmp_path: Path) -> None:
    storage = StorageSection(folder=str(tmp_path), journal_streams=True, fsync="never")
    with waiting(server=OFTEN, storage=storage) as live:
        reply = answered(live, "/v1/completions", say(live), 2)
    pings, _, events = reply.body.partition(b"id: ")
    assert pings.replace(PING_COMMENT, b"") == b""
    assert events.partition(b"\n")[0].endswith(b":1")
