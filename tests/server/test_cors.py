"""Browsers: pages of other sites can do nothing unless they were named."""

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.http.exchange import Hosts
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer

PAGE = "https://chat.example.org"
COMPLETION = {"model": MODEL, "prompt": "p", "max_tokens": 2}
ASK_FIRST = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, x-stainless-lang",
}


def allowed(reply: Reply) -> bool:
    return "access-control-allow-origin" in reply.headers


def test_without_configuration_no_page_is_let_in(live: LiveServer) -> None:
    preflight = ask(live.port, "OPTIONS", "/v1/completions", headers=ASK_FIRST)
    assert preflight.status == 405
    assert not allowed(preflight)
    refused = ask(live.port, "POST", "/v1/completions", COMPLETION, {"Origin": PAGE})
    assert (refused.status, refused.error["code"], allowed(refused)) == (403, "foreign_page", False)


def test_a_page_that_was_named_may_ask_stream_and_read_errors() -> None:
    with LiveServer(server=ServerSection(cors_origins=[PAGE], api_key="s3cret")) as live:
        preflight = ask(live.port, "OPTIONS", "/v1/completions", headers=ASK_FIRST)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert preflight.headers["access-control-allow-headers"] == ASK_FIRST["Access-Control-Request-Headers"]
        headers = {"Origin": PAGE, "Authorization": "Bearer s3cret"}
        for body, status in ((COMPLETION, 200), ({**COMPLETION, "stream": True}, 200), ({}, 400)):
            reply = ask(live.port, "POST", "/v1/completions", body, headers)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
            assert reply.headers["vary"] == "Origin"
            exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
            assert {"x-request-id", "request-id", "retry-after", "warning"} <= set(exposed)
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


@pytest.mark.parametrize(
    "host, fields, status",
    [
        ("evil.example", {}, 403),
        ("evil.example:8000", {"cors_origins": ["*"]}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("evil.example", {"allowed_hosts": ["llm.example"]}, 403),
        ("LLM.example.:80", {"allowed_hosts": ["llm.example"]}, 200),
        ("evil.example", {"allowed_hosts": ["*"]}, 200),
        ("evil.example", {"api_key": "s3cret"}, 200),
        ("localhost:8000", {}, 200),
        ("a.localhost", {}, 200),
        ("host.docker.internal:8000", {}, 200),
        ("callboard", {}, 200),
        ("127.0.0.1:8000", {}, 200),
        ("[::1]:8000", {}, 200),
    ],
)
def test_a_page_whose_name_leads_here_by_a_trick_stays_out(host: str, fields: dict[str, Any], status: int) -> None:
    hosts = Hosts(ServerSection(**fields))
    request = make_mocked_request("GET", "/v1/models", {"Host": host})
    if status == 200:
        hosts.check(request)
        return
    with pytest.raises(RequestError, match="allowed_hosts") as refused:
        hosts.check(request)
    assert (refused.value.status, refused.value.code) == (status, "unknown_host")


def test_the_host_is_checked_before_anything_else(live: LiveServer) -> None:
    for path in ("/", "/v1/models", "/nothing"):
        assert ask(live.port, "GET", path, headers={"Host": "evil.example"}).error["code"] == "unknown_host"
