"""Access to routes: declared beside each handler, held by keys, a token on loopback, and a log of changes."""

import asyncio
import hashlib
import logging
import os
import stat
from argparse import Namespace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from engine.config import Config, load_config
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from server.access import FREE_WRONG_KEYS, WRONG_KEY_DELAY_S, WrongKeys, paths_for, routes_of
from server.http.operation import Operation
from server.http.routes import ROUTES, Routes
from server.keys import Keys, read_keys
from server.local_token import TOKEN_CHARS, make_token, read_token, token_file
from server.operators.apply_command import apply
from tests.server.http_client import RawClient, as_operator, ask, http_bytes
from tests.server.live_server import LiveServer
from tests.server.test_keys import BOTH, Clock, bearer, keys_in

CHANGING = ("/apply", "/sleep", "/wake_up", "/start_profile", "/stop_profile", "/debug/recording",
            "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/update_weights_from_disk",
            "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
            "/init_weights_update_group", "/pause", "/pause_generation", "/resume", "/continue_generation",
            "/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine",
            "/release_memory_occupation", "/resume_memory_occupation")  # fmt: skip
SHOWING = (
    "/metrics",
    "/stats",
    "/server_info",
    "/get_server_info",
    "/load",
    "/v1/loads",
    "/health_generate",
    "/is_sleeping",
    "/weight_version",
    "/get_weight_version",
    "/weight_info",
    "/get_world_size",
    "/is_paused",
    "/flush_cache",
)
OPEN = {"/", "/page/{name}", "/health", "/ping", "/ready", "/api/version"}


def test_every_route_declares_its_access_and_those_of_the_whole_server_are_operators() -> None:
    with LiveServer() as live:
        app = live.runner.app
    assert paths_for(app, "operator") == {*CHANGING, *SHOWING}
    assert paths_for(app, "open") == OPEN


def test_a_route_that_declares_nothing_answers_nothing() -> None:
    async def undeclared(request: web.Request) -> web.Response:
        raise AssertionError("it was called")

    app, routes = web.Application(), Routes()
    app[ROUTES] = routes
    app.router.add_get("/new", undeclared)
    with pytest.raises(LookupError, match="does not declare its access"):
        routes_of(app)
    app = web.Application()
    routes.handle(Operation("GET", "/new", "client"), undeclared)
    app[ROUTES] = routes
    app.add_routes(routes.definitions())
    assert routes_of(app) == {("GET", "/new"): "client", ("HEAD", "/new"): "client"}


@pytest.mark.parametrize("path", CHANGING)
def test_with_clients_keys_alone_nobody_changes_the_server_and_the_answer_says_what_to_set(path: str) -> None:
    with LiveServer(server=ServerSection(api_key=["of one client", "of another"])) as live:
        reply = ask(live.port, "POST", path, {}, {"Authorization": "Bearer of one client"})
    assert (reply.status, reply.error["code"]) == (403, "operators_only")
    assert "set server.operator_key, or [operators] in server.key_file" in reply.error["message"]


@pytest.mark.parametrize("path", SHOWING)
def test_with_clients_keys_alone_nobody_looks_at_the_whole_server(path: str) -> None:
    with LiveServer(server=ServerSection(api_key="of a client")) as live:
        assert ask(live.port, "GET", path, headers={"Authorization": "Bearer of a client"}).status == 403
        assert ask(live.port, "GET", path, headers=as_operator()).status == 401, "the token is for keyless servers"


def test_an_operators_key_opens_all_and_clients_need_none_for_theirs() -> None:
    with LiveServer(server=ServerSection(operator_key="of an operator")) as live:
        assert ask(live.port, "GET", "/v1/models", headers={"Authorization": ""}).status == 200
        assert ask(live.port, "GET", "/metrics", headers={"Authorization": ""}).status == 401
        assert ask(live.port, "GET", "/metrics", headers=as_operator()).status == 401
        assert ask(live.port, "GET", "/metrics", headers={"Authorization": "Bearer of an operator"}).status == 200


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "callboard"


def test_without_keys_operators_need_the_token_that_only_this_user_reads(cache: Path) -> None:
    with LiveServer() as live:
        assert ask(live.port, "GET", "/v1/models", headers={"Authorization": ""}).status == 200
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer " + "0" * TOKEN_CHARS}):
            refused = ask(live.port, "POST", "/apply", {}, headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert "token" in refused.error["message"]
            assert str(cache) not in refused.error["message"]
        assert ask(live.port, "GET", "/metrics", headers=as_operator()).status == 200
    file = token_file()
    assert file is not None
    assert file.parent == cache
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [one.name for one in cache.iterdir()] == [file.name]
    assert make_token() == read_token() == file.read_text()


def test_without_a_home_the_token_is_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"callboard-{os.getuid()}"
    assert (token_file(), len(make_token())) == (folder / "operator.token", TOKEN_CHARS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    assert (token_file(), make_token(), read_token()) == (None, "", ""), "others may enter"


@pytest.mark.parametrize("how", ["readable by others", "a link", "cut short"])
def test_a_token_that_others_may_have_written_or_read_is_none(cache: Path, how: str) -> None:
    token, file = make_token(), token_file()
    assert file is not None
    if how == "a link":
        file.rename(cache / "elsewhere")
        file.symlink_to(cache / "elsewhere")
    elif how == "cut short":
        file.write_text(token[:10])
    else:
        file.chmod(0o644)
    assert read_token() == ""
    made = make_token()
    if how == "readable by others":
        assert made == "", "others know it"
    else:
        assert (len(made), made != token) == (TOKEN_CHARS, True), "a new one has taken its place"
        return
    with LiveServer() as live:
        reply = ask(live.port, "POST", "/apply", {}, {"Authorization": f"Bearer {token}"})
    assert (reply.status, reply.error["code"]) == (403, "operators_only")


def test_the_command_sends_the_token_to_this_machine_and_nowhere_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    async def noted(url: str, ask: object, key: str) -> None:
        asked.append((url, key))

    monkeypatch.setattr("server.operators.apply_command._ask", noted)
    monkeypatch.setattr("server.operators.apply_command._show", lambda outcome: None)
    token = make_token()
    for url in ("http://127.0.0.1:1", "http://other:1", "http://127.0.0.1.example.org:1"):
        apply(Namespace(target=None, url=url, key=None, dry_run=True), Config())
    assert [key for _, key in asked] == [token, "", ""]


def test_what_operators_change_is_written_down_with_their_name_and_what_they_look_at_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = keys_in(tmp_path, BOTH)
    with LiveServer(server=server) as live, caplog.at_level(logging.INFO, "callboard.audit"):
        ask(live.port, "GET", "/metrics", headers=bearer("o"))
        ask(live.port, "POST", "/sleep", {}, bearer("a"))
        assert [one for one in caplog.records if one.name == "callboard.audit"] == []
        assert ask(live.port, "POST", "/stop_profile", {}, bearer("o") | {"X-Request-Id": "r1"}).status == 404
    (line,) = [one.getMessage() for one in caplog.records if one.name == "callboard.audit"]
    assert line == "operator=olga address=127.0.0.1 method=POST route=/stop_profile outcome=404 changed=- request=r1"


def test_a_key_may_stand_as_its_hash_and_may_expire(tmp_path: Path) -> None:
    clock = Clock()
    digest = hashlib.sha256(b"a---------------").hexdigest()
    text = (
        f"[clients]\nalice = 'sha256:{digest}'\nbob = {{ key = 'b---------------', expires = 2027-01-31T00:00:00Z }}\n"
    )
    keys = Keys(keys_in(tmp_path, text), wall=clock)
    clock.now = datetime(2027, 1, 30, 23, 59, tzinfo=UTC).timestamp()
    assert [key.name for given in (b"a", b"b") if (key := keys.find(given.ljust(16, b"-")))] == ["alice", "bob"]
    assert keys.find(f"sha256:{digest}".encode()) is None, "the file holds no key"
    clock.now += 120
    assert keys.find(b"b---------------") is None
    assert keys.find(b"a---------------") is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[clients]\nalice = 'short'\n", "5 characters, expected at least 16"),
        ("[clients]\nalice = { key = 'short', expires = 2027-01-31T00:00:00Z }\n", "5 characters, expected at least"),
        ("[clients]\nalice = 'sha256:0123456789abcdef'\n", "expected 64 hexadecimal digits after sha256:"),
        ("[clients]\nalice = { key = 'a---------------', expires = 2027-01-31T00:00:00 }\n", "expected TOML"),
    ],
)
def test_a_key_that_can_be_guessed_or_never_matches_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError) as failed:
        read_keys(ServerSection(key_file=str(tmp_path / "keys.toml")))
    assert said in str(failed.value)


@pytest.mark.parametrize("name", ["api_key", "operator_key"])
def test_a_short_key_of_the_configuration_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"server\.{name}: 6 characters, expected at least 16: openssl"):
        load_config(None, [], {f"CALLBOARD_SERVER__{name.upper()}": "secret"})


def test_wrong_keys_of_an_address_are_slowed_and_right_ones_are_not() -> None:
    clock = Clock()
    wrong = WrongKeys(clock)
    assert [wrong.delay_s("a") for _ in range(FREE_WRONG_KEYS + 1)] == [*[0.0] * FREE_WRONG_KEYS, WRONG_KEY_DELAY_S]
    assert wrong.delay_s("b") == 0.0
    clock.now += 61
    assert wrong.delay_s("a") == 0.0


async def test_a_server_slows_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.access.WRONG_KEY_DELAY_S", 0.3)
    with LiveServer(server=ServerSection(api_key="the right one")) as live:
        request = partial(http_bytes, "GET", "/v1/models")

        def took_s(key: str) -> float:
            with RawClient(live.port) as client:
                started = asyncio.get_running_loop().time()
                client.send(request(headers={"Authorization": f"Bearer {key}"}))
                client.read_reply()
                return asyncio.get_running_loop().time() - started

        for number in range(FREE_WRONG_KEYS):
            took_s(f"wrong {number}")
        assert took_s("wrong once more") >= 0.3
        assert took_s("the right one") < 0.3


def test_a_deep_probe_is_shared_and_one_client_cannot_fill_the_queue_with_it() -> None:
    with LiveServer() as live:
        live.call(lambda: setattr(live.ingress, "delay_s", 0.3))
        clients = [RawClient(live.port) for _ in range(8)]
        for client in clients:
            client.send(http_bytes("GET", "/health_generate", headers=as_operator()))
        assert [client.read_reply().status for client in clients] == [200] * 8
        assert len(live.ingress.asked) == 1
        for client in clients:
            client.__exit__()
