"""Who gets a connection when many want one, and what pages of other origins may send."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.actors.admission import CHARS_PER_TOKEN, num_chars, prompt_cost
from engine.config import load_config
from engine.settings.sections import ServerSection, StorageSection
from engine.types.errors import ConfigError, RequestError
from engine.types.prompt import ChatTurn
from server.http import connection
from server.http.bodies import Bodies
from server.openai.requests import MAX_PARTS, MAX_TURNS
from tests.pace import far
from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer

HANG = json.dumps({"model": MODEL, "prompt": "!hang"}).encode()


def test_a_connection_that_says_nothing_is_closed_at_its_deadline() -> None:
    with LiveServer(server=ServerSection(client_timeout_s=0.4)) as live, RawClient(live.port) as client:
        assert 0.3 < client.seconds_until_closed() < 5


def test_silent_connections_make_room_for_those_that_ask_and_the_oldest_go_first() -> None:
    section = ServerSection(max_connections=20, max_connections_per_address=20)
    with LiveServer(server=section) as live, ExitStack() as stack:
        silent = [stack.enter_context(RawClient(live.port)) for _ in range(20)]
        assert live.wait_until(lambda: live.runner.server.num_open == 20, 5)  # type: ignore[union-attr]
        for _ in range(3):
            assert ask(live.port, "GET", "/health").status == 200
        assert live.runner.server.num_open <= 20  # type: ignore[union-attr]
        assert silent[0].seconds_until_closed() < 1
        assert live.runner.server.traffic.cuts["evicted"] >= 1  # type: ignore[union-attr]
        silent[-1].send(http_bytes("GET", "/health"))
        assert silent[-1].read_reply().status == 200, "the newest of them stay"


def test_a_connection_in_which_something_is_asked_never_goes_for_another() -> None:
    section = ServerSection(max_connections=2, max_connections_per_address=2)
    with LiveServer(server=section) as live, RawClient(live.port) as asking, RawClient(live.port):
        asking.send(http_bytes("POST", "/v1/completions", HANG))
        assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        for _ in range(5):
            assert ask(live.port, "GET", "/health").status == 200
        assert live.call(lambda: live.ingress.num_open) == 1


def test_an_address_has_a_quarter_of_the_places_and_closes_its_own() -> None:
    with LiveServer(server=ServerSection(max_connections=16)) as live, ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(RawClient(live.port))
        assert live.wait_until(lambda: live.runner.server.traffic.cuts["evicted"] >= 26, 5)  # type: ignore[union-attr]
        assert live.runner.server.num_open == 4  # type: ignore[union-attr]


def test_probes_have_places_of_their_own() -> None:
    section = ServerSection(max_connections=2, max_connections_per_address=99)
    with LiveServer(server=section) as live, ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(RawClient(live.port))
            client.send(http_bytes("POST", "/v1/completions", HANG))
        assert live.wait_until(lambda: live.ingress.num_open == 2, 5)
        for path in connection.PROBES:
            assert ask(live.port, "GET", path).status == 200
        refused = ask(live.port, "GET", "/v1/models")
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")


def test_bodies_under_way_have_a_budget_for_each_client_and_for_all() -> None:
    bodies, section = Bodies(), ServerSection(max_body_bytes=1 << 20)
    held = [bodies.share("alice", section) for _ in range(17)]
    for one in held[:16]:
        one.hold(1 << 20)
    with pytest.raises(RequestError, match="bodies of 15 MiB are under way") as refused:
        for size in (1 << 19, 1 << 20, 2 << 20):
            held[16].hold(size)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "bodies_full", 1)
    bodies.share("bob", section).hold(1 << 20)
    others = [bodies.share(f"client {number}", section) for number in range(80)]
    with pytest.raises(RequestError, match="under way"):
        for one in others:
            one.hold(1 << 20)
    for one in (*held, *others):
        one.close()
    assert bodies.num_bytes.total() == (1 << 20) - (64 << 10)


def test_unfinished_bodies_of_a_client_are_refused_beyond_its_budget() -> None:
    section = ServerSection(max_body_bytes=1 << 20)
    data = http_bytes("POST", "/v1/completions", b" " * (1 << 20))[:-1]
    with LiveServer(server=section) as live, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(live.port)) for _ in range(24)]
        for client in clients:
            client.send(data)
        assert live.wait_until(lambda: live.runner.server.traffic.refusals["bodies_full"] >= 6, 5)  # type: ignore[union-attr]
        assert ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": "p"}).status == 200


FOREIGN = {"Origin": "https://evil.example"}  # as browsers send it that do not know Sec-Fetch-Site


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/start_profile", "/debug/recording", "/reset_prefix_cache", "/apply", "/v1/completions",
     "/v1/files"],
)  # fmt: skip
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_what_a_page_of_another_origin_sends_is_refused(path: str, origin: str) -> None:
    with LiveServer() as live:
        reply = ask(live.port, "POST", path, {}, {"Origin": origin})
    assert (reply.status, reply.error["code"]) == (403, "foreign_page")


def test_the_servers_own_page_and_those_that_are_named_may_send() -> None:
    body = {"model": MODEL, "prompt": "p"}
    with LiveServer(server=ServerSection(cors_origins=["https://named.example"])) as live:
        for origin in (live.url, live.url.upper().replace("HTTP", "http"), "https://named.example"):
            headers = {"Host": live.url.removeprefix("http://"), "Origin": origin}
            assert ask(live.port, "POST", "/v1/completions", body, headers).status == 200


def test_nothing_acts_on_a_get() -> None:
    with LiveServer() as live:
        for path in ("/reset_prefix_cache", "/sleep", "/apply"):
            assert ask(live.port, "GET", path).status == 405


@pytest.mark.parametrize("host", ["0.0.0.0:8000", "[::]:8000", "0.0.0.0"])
def test_no_address_that_leads_anywhere_is_a_name(host: str) -> None:
    with LiveServer() as live:
        reply = ask(live.port, "GET", "/v1/models", headers={"Host": host})
    assert (reply.status, reply.error["code"]) == (403, "unknown_host")


def test_a_star_for_pages_needs_keys() -> None:
    with pytest.raises(ConfigError, match="every page of the web could use the server"):
        load_config(None, ['server.cors_origins=["*"]'], {})
    key = {"CALLBOARD_SERVER__API_KEY": "k" * 16}
    assert load_config(None, ['server.cors_origins=["*"]'], key).server.cors_origins == ["*"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere", "/"])
def test_no_answer_is_sniffed(path: str) -> None:
    with LiveServer() as live:
        assert ask(live.port, "GET", path).headers["x-content-type-options"] == "nosniff"


def test_an_id_with_spaces_is_none_and_forges_no_field_of_the_log() -> None:
    with LiveServer() as live:
        headers = {"X-Request-Id": "a client=ops POST /apply status=200"}
        assert ask(live.port, "GET", "/health", headers=headers).headers["x-request-id"].startswith("req-")


def test_every_turn_costs_a_token_at_least_and_tools_cost_what_they_say() -> None:
    turns = [ChatTurn("user", "")] * 1000
    assert num_chars(turns) == 1000 * CHARS_PER_TOKEN
    assert prompt_cost(None, None, turns) == 1001
    assert prompt_cost(None, None, turns, "x" * 4000) == 2001


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 110_000}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": ""}] * 110_000}),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 110_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 50_000}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 110_000}),
    ],
)
def test_a_hundred_thousand_empty_messages_are_refused_while_they_are_decoded(path: str, fields: dict) -> None:
    assert MAX_TURNS < 110_000
    assert MAX_PARTS < 50_000
    with LiveServer(server=ServerSection(max_body_bytes=8 << 20)) as live:
        started = time.monotonic()
        reply = ask(live.port, "POST", path, {"model": MODEL, **fields})
        assert time.monotonic() - started < far(5)
        assert reply.status == 400
        assert b"length <=" in reply.body
        assert live.ingress.asked == []


def test_a_form_that_is_wrong_prints_nothing_of_what_a_client_has_sent(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="purpose\r\n\r\nbatch\r\n--b--\r\n'
    with LiveServer(storage=StorageSection(folder=str(tmp_path))) as live:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        assert ask(live.port, "POST", "/v1/files", body, headers).status == 400
    assert [str(one.message) for one in recwarn] == []
