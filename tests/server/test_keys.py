"""Keys in a file: who may do what, that the file may change meanwhile, and what a client may use in a minute."""

import json
import logging
from pathlib import Path

import pytest

from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from engine.types.errors import ConfigError, RequestError
from server.clients import Rates
from server.keys import LOOK_EVERY_S, Keys, read_keys
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer

ALICES, BOBS = b"a---------------", b"b---------------"
BOTH = "[clients]\nalice = 'a---------------'\nbob = 'b---------------'\n[operators]\nolga = 'o---------------'\n"


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys_in(folder: Path, text: str) -> ServerSection:
    path = folder / "keys.toml"
    path.write_text(text)
    return ServerSection(key_file=str(path))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.ljust(16, '-')}"} if key else {}


def complete(live: LiveServer, key: str = "", **fields: object) -> Reply:
    return ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": "p", **fields}, bearer(key))


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "keys.toml"
    path.write_text("[clients]\nalice = 'a---------------'\n")
    keys = Keys(ServerSection(key_file=str(path), api_key="inline"), clock)

    def found(later_s: float) -> list[str]:
        clock.now += later_s
        return [key.name for given in (b"inline", ALICES, BOBS, b"") if (key := keys.find(given)) is not None]

    assert found(0) == ["key 0", "alice"]
    path.write_text("[clients]\nalice2 = 'a---------------'\nbob = 'b---------------'\n")
    assert found(LOOK_EVERY_S / 2) == ["key 0", "alice"], "a look at the file for every request is too many"
    assert found(LOOK_EVERY_S) == ["key 0", "alice2", "bob"]
    path.write_text("[clients]\nalice = ''")
    with caplog.at_level(logging.ERROR):
        assert found(LOOK_EVERY_S) == ["key 0", "alice2", "bob"]
        assert found(LOOK_EVERY_S) == ["key 0", "alice2", "bob"]
    assert len(caplog.records) == 1
    assert "the key is empty" in caplog.text
    path.unlink()
    assert found(LOOK_EVERY_S) == ["key 0", "alice2", "bob"]
    path.write_text("[clients]\nbob = 'b---------------'\n")
    assert found(LOOK_EVERY_S) == ["key 0", "bob"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[clients]\nalice = 1\n", "expected TOML with [clients]"),
        ("alice = 'a---------------'\n", "expected TOML with [clients]"),
        ("[clients\n", "expected TOML with [clients]"),
        ("\udcff", "expected TOML with [clients]"),
        ("", "holds no key"),
        ("[clients]\na = 'x---------------'\nb = 'x---------------'\n", "the same name or the same key"),
        ("[clients]\na = 'x---------------'\n[operators]\na = 'y---------------'\n", "the same name or the same key"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="key_file") as failed:
        read_keys(ServerSection(key_file=str(path)))
    assert said in str(failed.value)


def test_a_file_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(ServerSection(key_file="/nowhere/keys.toml"))


def test_who_starts_anew_beside_a_broken_file_waits_for_a_better_one(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "keys.toml"
    keys = Keys(ServerSection(key_file=str(path), api_key="inline"), clock)
    assert keys.find(b"inline") is None
    path.write_text(BOTH)
    clock.now += LOOK_EVERY_S
    assert [keys.find(one) is None for one in (b"inline", ALICES, b"x" * 16)] == [
        False,
        False,
        True,
    ]


def test_what_operators_see_stays_closed_when_their_keys_are_gone(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "keys.toml"
    path.write_text(BOTH)
    keys = Keys(ServerSection(key_file=str(path)), clock)
    path.write_text("[clients]\nalice = 'a---------------'\n")
    clock.now += LOOK_EVERY_S
    assert keys.find(b"o---------------") is None
    assert keys.has_operators


def test_what_operators_see_needs_their_key_and_the_log_names_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(server=keys_in(tmp_path, BOTH)) as live:
        with caplog.at_level(logging.INFO, "server.http.exchange"):
            assert complete(live, "a").status == 200
        assert "client=alice" in caplog.text
        assert complete(live).status == 401
        for path in ("/metrics", "/stats", "/load"):
            assert ask(live.port, "GET", path, headers=bearer("o")).status == 200
            refused = ask(live.port, "GET", path, headers=bearer("a"))
            assert (refused.status, refused.error["code"]) == (403, "operators_only")
        assert ask(live.port, "GET", "/v1/models", headers=bearer("a")).status == 200


def test_an_operator_may_end_anybodys_request_and_a_client_only_its_own(tmp_path: Path) -> None:
    with LiveServer(server=keys_in(tmp_path, BOTH)) as live, RawClient(live.port) as client:
        body = json.dumps({"model": MODEL, "prompt": "!hang"}).encode()
        client.send(http_bytes("POST", "/v1/completions", body, bearer("a")))
        assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        for key, aborted in (("b", 0), ("o", 1)):
            reply = ask(live.port, "POST", "/abort_request", {"abort_all": True}, bearer(key))
            assert reply.json["num_aborted"] == aborted
        assert client.read_reply().status == 200


def test_requests_of_a_minute_come_back_one_by_one() -> None:
    clock = Clock()
    rates = Rates(LimitsSection(requests_per_minute=2), clock)
    rates.admit("alice")
    rates.admit("alice")
    with pytest.raises(RequestError, match="2 requests per minute") as refused:
        rates.admit("alice")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 30)
    rates.admit("bob")
    clock.now += 30
    rates.admit("alice")
    with pytest.raises(RequestError):
        rates.admit("alice")
    clock.now += 600
    rates.admit("alice")
    rates.admit("alice")
    with pytest.raises(RequestError):
        rates.admit("alice")


def test_tokens_that_were_too_many_are_waited_for() -> None:
    clock = Clock()
    rates = Rates(LimitsSection(tokens_per_minute=60), clock)
    rates.admit("alice")
    rates.spend("alice", 90)
    with pytest.raises(RequestError, match="60 tokens per minute") as refused:
        rates.admit("alice")
    assert refused.value.retry_after_s == 31
    clock.now += 31
    rates.admit("alice")


def test_clients_that_are_idle_cost_no_memory() -> None:
    clock = Clock()
    rates = Rates(LimitsSection(requests_per_minute=60), clock)
    for number in range(20_000):
        clock.now += 0.1
        rates.admit(f"address {number}")
    assert rates.num_remembered < 5_000


def test_over_http_tokens_are_counted_when_a_request_ends() -> None:
    with LiveServer(limits=LimitsSection(tokens_per_minute=4)) as live:
        assert complete(live, max_tokens=8).status == 200
        refused = complete(live, max_tokens=1)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1


HANG = "!hang" + "x" * 1600  # about 400 tokens


def test_tokens_are_taken_when_a_request_begins_so_that_many_at_once_cannot_overdraw() -> None:
    with LiveServer(limits=LimitsSection(tokens_per_minute=300)) as live, RawClient(live.port) as client:
        body = json.dumps({"model": MODEL, "prompt": HANG, "stream": True}).encode()
        client.send(http_bytes("POST", "/v1/completions", body))
        assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        assert complete(live).error["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("journal_streams", [False, True])
def test_a_client_that_leaves_before_the_first_token_pays_its_prompt(tmp_path: Path, journal_streams: bool) -> None:
    storage = StorageSection(folder=str(tmp_path), journal_streams=journal_streams)
    with LiveServer(limits=LimitsSection(tokens_per_minute=300), storage=storage) as live:
        with RawClient(live.port) as client:
            body = json.dumps({"model": MODEL, "prompt": HANG, "stream": not journal_streams}).encode()
            client.send(http_bytes("POST", "/v1/completions", body))
            assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        assert live.wait_until(lambda: live.ingress.num_open == 0, 5)
        assert complete(live).error["code"] == "rate_limit_exceeded"


def test_a_request_that_is_refused_pays_nothing_and_one_that_ends_pays_what_it_has_used() -> None:
    with LiveServer(limits=LimitsSection(tokens_per_minute=300, max_requests_per_client=3)) as live:
        assert complete(live, prompt="x" * 9000).status == 400
        assert complete(live, prompt="x" * 1600, n=4).status == 429
        assert [complete(live, prompt="x" * 800, max_tokens=250).status for _ in range(5)] == [200] * 5
        assert complete(live).status == 200
