"""Browsers: pages of other sites can do nothing unless they were named."""

import pytest

from engine.sections import ServerSection
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer

PAGE = "https://chat.example.org"
COMPLETION = {"model": MODEL, "prompt": "p", "max_tokens": 2}
ASK_FIRST = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def allowed(reply: Reply) -> bool:
    return "access-control-allow-origin" in reply.headers


def test_without_configuration_no_page_is_let_in(live: LiveServer) -> None:
    preflight = ask(live.port, "OPTIONS", "/v1/completions", headers=ASK_FIRST)
    assert preflight.status == 405
    assert not allowed(preflight)
    assert not allowed(ask(live.port, "POST", "/v1/completions", COMPLETION, {"Origin": PAGE}))


def test_a_page_that_was_named_may_ask_stream_and_read_errors() -> None:
    with LiveServer(server=ServerSection(cors_origins=[PAGE], api_key="s3cret")) as live:
        preflight = ask(live.port, "OPTIONS", "/v1/completions", headers=ASK_FIRST)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "Authorization" in preflight.headers["access-control-allow-headers"]
        headers = {"Origin": PAGE, "Authorization": "Bearer s3cret"}
        for body, status in ((COMPLETION, 200), ({**COMPLETION, "stream": True}, 200), ({}, 400)):
            reply = ask(live.port, "POST", "/v1/completions", body, headers)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
            assert reply.headers["vary"] == "Origin"
        unauthorised = ask(live.port, "POST", "/v1/completions", COMPLETION, {"Origin": PAGE})
        assert (unauthorised.status, allowed(unauthorised)) == (401, True)
        assert "access-control-allow-credentials" not in unauthorised.headers


@pytest.mark.parametrize("origin", ["https://evil.example", PAGE + ".evil.example", "null", PAGE.upper()])
def test_other_pages_stay_out(origin: str) -> None:
    with LiveServer(server=ServerSection(cors_origins=[PAGE])) as live:
        preflight = ask(live.port, "OPTIONS", "/v1/completions", headers={**ASK_FIRST, "Origin": origin})
        assert (preflight.status, allowed(preflight)) == (405, False)
        assert not allowed(ask(live.port, "GET", "/health", headers={"Origin": origin}))


def test_a_star_lets_everybody_in() -> None:
    with LiveServer(server=ServerSection(cors_origins=["*"])) as live:
        assert ask(live.port, "OPTIONS", "/v1/completions", headers=ASK_FIRST).status == 204
        assert not allowed(ask(live.port, "GET", "/health"))  # not a browser's request
