"""Log lines that machines read."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from engine.host.logs import JSONFormatter
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the server's loggers write as JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JSONFormatter())
    logger = logging.getLogger("server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_request_is_one_object_with_its_fields(live: LiveServer, lines: io.StringIO) -> None:
    ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": "p", "max_tokens": 3}, {"X-Request-Id": 'a"b'})
    origin = live.call(lambda: live.ingress.asked[-1][2].origin)
    assert (origin.client, origin.request) == ("127.0.0.1", 'a"b'), "observers hear who the access log says it was"
    (entry,) = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert entry["time"].endswith("+00:00")
    assert entry.pop("duration_ms") >= 0
    assert {key: entry[key] for key in ("level", "logger", "request", "client", "method", "route", "status")} == {
        "level": "info",
        "logger": "server.http.exchange",
        "request": 'a"b',
        "client": "127.0.0.1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
    }
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (2, 3)
    assert 'request=a"b client=127.0.0.1 POST /v1/completions status=200' in entry["message"]


def test_a_traceback_and_odd_characters_stay_on_their_line(live: LiveServer, lines: io.StringIO) -> None:
    ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": "!bug"})
    logging.getLogger("server.test").warning("a\nb\u2028c %s", "δ")
    first, _, last = [json.loads(line) for line in lines.getvalue().splitlines(keepends=True) if line.strip("\u2028")]
    assert first["level"] == "error"
    assert "RuntimeError: open failed" in first["traceback"]
    assert last["message"] == "a\nb\u2028c δ"


def test_a_script_that_waits_for_readiness_leaves_a_line_only_when_it_is_lost(
    live: LiveServer, lines: io.StringIO
) -> None:
    def statuses() -> list[int]:
        return [json.loads(line)["status"] for line in lines.getvalue().splitlines()]

    def become(*, ready: bool) -> None:
        live.call(lambda: setattr(live.ingress, "ready", ready))

    become(ready=False)
    assert [ask(live.port, "GET", "/ready").status for _ in range(3)] == [503] * 3
    assert statuses() == []
    become(ready=True)
    assert ask(live.port, "GET", "/ready").status == 200
    become(ready=False)
    assert [ask(live.port, "GET", "/ready").status for _ in range(3)] == [503] * 3
    assert statuses() == [503]
    become(ready=True)
    assert ask(live.port, "POST", "/ready").status == 405
    assert statuses() == [503, 405]
