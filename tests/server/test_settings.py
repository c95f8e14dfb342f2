"""Settings that change and an engine that rests, over HTTP, by the command and by SIGHUP."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.actors.operations import Operate, Operated
from engine.config import ConfigSource
from engine.types.errors import ConfigError, RequestError
from server.cli import main
from server.run.operations import MAX_ASKED, RemoteOperations
from tests.pace import far
from tests.server.http_client import Reply, ask
from tests.server.live_server import LiveServer
from tests.server.live_system import LiveSystem

BASE = """
[model]
name = "tested"
[device]
kind = "cpu"
threads = 1
[plugins]
attention = "torch"
linear = "torch"
[kv]
num_pages = 256
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "callboard.toml"
    path.write_text(BASE)
    return path


@pytest.fixture(scope="module")
def live(file: Path) -> Iterator[LiveSystem]:
    source = ConfigSource(file)
    with LiveSystem(source.load(), source=source) as live:
        yield live


def apply(live: LiveSystem, toml: str | None, **fields: Any) -> Reply:
    return ask(live.port, "POST", "/apply", {"toml": toml, **fields})


def fingerprint(live: LiveSystem) -> str:
    reply = live.complete([1, 2, 3], max_tokens=2)
    assert reply.status == 200
    return str(reply.json["system_fingerprint"])


def test_settings_change_and_answers_say_so(live: LiveSystem) -> None:
    toml = BASE + "[limits]\nmax_requests = 77\n"
    toml = toml.replace("num_pages = 256", 'num_pages = 300\ndtype = "int8"')
    before = fingerprint(live)
    would = apply(live, toml, dry_run=True).json
    assert [one["key"] for one in would["changes"]] == ["kv.dtype", "kv.num_pages", "limits.max_requests"]
    assert (would["road"], would["applied"]) == ("beside", False)
    assert live.gauges().pages_free + live.gauges().pages_cached == 256
    reply = apply(live, toml)
    assert (reply.status, reply.json["applied"]) == (200, True)
    assert fingerprint(live) != before
    info = ask(live.port, "GET", "/server_info").json
    assert (info["kv_tokens"], info["max_requests"]) == (300 * 16, 77)
    assert apply(live, None).json["applied"], "the file of the server says what it said"
    assert live.system.config.kv.dtype == "auto"
    assert ask(live.port, "GET", "/server_info").json["max_requests"] == 512


@pytest.mark.parametrize(
    ("toml", "param"),
    [
        ("[kv]\npage_size = 17\n", "kv.page_size"),
        ("[kv]\nnum_pages = 1000000000\n" + BASE.replace("[kv]\nnum_pages = 256\n", ""), "kv.num_pages"),
        ("[server]\nport = 9\n" + BASE, "server.port"),
        ("[server\n", None),
        (BASE.replace('attention = "torch"', 'attention = "nowhere"'), None),
        (BASE.replace("[device]", 'path = "/nowhere"\n[device]'), "model.path"),
        (BASE + "[plugins.options.'kv_store.files']\npath = \"/nowhere\"\n", "plugins.options"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_it_and_changes_nothing(
    live: LiveSystem, toml: str, param: str | None
) -> None:
    before = live.system.config
    reply = apply(live, toml)
    assert reply.status == 400, reply.body
    assert reply.json["error"]["code"] == "invalid_settings"
    assert reply.json["error"]["param"] == param
    assert "nothing has changed" in reply.json["error"]["message"]
    assert live.system.config is before
    assert live.complete([1], max_tokens=1).status == 200


def test_a_request_deletes_no_files_by_the_options_of_a_store(live: LiveSystem, tmp_path: Path) -> None:
    secret = tmp_path / ".ssh" / "id_ed25519"
    secret.parent.mkdir()
    secret.write_text("secret")
    store = f"[plugins.options.'kv_store.files']\npath = '{tmp_path}'\nmax_gb = 1e-9\n"
    reply = apply(live, BASE.replace("[kv]", f"kv_store = 'files'\n{store}[kv]"))
    assert reply.status == 400, reply.body
    assert "change the file that the server was started with" in reply.json["error"]["message"]
    assert str(tmp_path) not in reply.json["error"]["message"]
    assert secret.read_text() == "secret"


def test_a_place_changes_by_the_file_of_the_server(live: LiveSystem, file: Path, tmp_path: Path) -> None:
    options = f"[plugins.options.'kv_store.files']\npath = '{tmp_path / 'store'}'\n"
    file.write_text(BASE.replace("[kv]", f"kv_store = 'files'\n{options}[kv]"))
    main(["apply", "--url", f"http://127.0.0.1:{live.port}"])
    assert (tmp_path / "store" / "callboard-kv-store").exists()
    file.write_text(BASE)
    assert apply(live, None).json["applied"]


def test_a_field_that_apply_does_not_have_is_named_and_nothing_changes(live: LiveSystem) -> None:
    before = live.system.config
    reply = apply(live, BASE + "[limits]\nmax_requests = 77\n", dryrun=True)
    assert (reply.status, reply.json["error"]["code"]) == (400, "unknown_parameter")
    assert reply.json["error"]["param"] == "dryrun"
    assert reply.json["error"]["message"] == "dryrun: no such field; there are dry_run, toml"
    assert live.system.config is before


@pytest.mark.parametrize("level", ["1", "2"])
def test_an_engine_sleeps_and_wakes_up(live: LiveSystem, level: str) -> None:
    assert ask(live.port, "GET", "/is_sleeping").json == {"is_sleeping": False}
    assert ask(live.port, "POST", f"/sleep?level={level}").json == {"is_sleeping": True}
    assert ask(live.port, "GET", "/is_sleeping").json == {"is_sleeping": True}
    refused = live.complete([1], max_tokens=1)
    assert (refused.status, refused.json["error"]["code"]) == (503, "asleep")
    assert refused.headers["retry-after"] == "5"
    assert ask(live.port, "GET", "/ready").status == 503
    health = ask(live.port, "GET", "/health")
    assert (health.status, health.json["status"]) == (200, "asleep")
    assert ask(live.port, "POST", "/wake_up").json == {"is_sleeping": False}
    assert live.complete([1], max_tokens=1).status == 200


def test_another_level_is_refused(live: LiveSystem) -> None:
    reply = ask(live.port, "POST", "/sleep?level=3")
    assert (reply.status, reply.json["error"]["param"]) == (400, "level")


def test_an_engine_that_cannot_change_says_so() -> None:
    with LiveServer() as live:
        reply = ask(live.port, "POST", "/apply", {})
        assert (reply.status, reply.json["error"]["code"]) == (404, "operations_off")


def test_the_command_shows_what_changes(live: LiveSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, url = tmp_path / "new.toml", f"http://127.0.0.1:{live.port}"
    path.write_text(BASE.replace("num_pages = 256", "num_pages = 280"))
    main(["apply", str(path), "--url", url, "--dry-run"])
    said = capsys.readouterr().out
    assert all(part in said for part in ("kv.num_pages", "256", "280", "executors", "not applied"))
    path.write_text(BASE + "[server]\nport = 9\n")
    with pytest.raises(SystemExit) as ended:
        main(["apply", str(path), "--url", url])
    assert ended.value.code == ConfigError.exit_code
    assert "server.port" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["apply", str(path), "--url", "127.0.0.1:9"])
    said = capsys.readouterr().err
    assert said == (
        "callboard: http://127.0.0.1:9: no server answers there (Connection refused); --url says where the server is\n"
    )
    with pytest.raises(SystemExit):  # the file's text is all that is sent
        main(["apply", str(path), "--url", url, "--set", "kv.num_pages=280"])
    assert "unrecognized arguments: --set" in capsys.readouterr().err


def test_the_command_says_that_tls_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer() as live, pytest.raises(SystemExit):
        main(["apply", "--url", f"https://127.0.0.1:{live.port}"])
    said = capsys.readouterr().err
    assert said.startswith(f"callboard: https://127.0.0.1:{live.port}: TLS failed: ")
    assert "--url says" not in said


def test_a_hangup_reads_the_file_again(live: LiveSystem, file: Path) -> None:
    file.write_text(BASE + "[limits]\nmax_requests = 66\n")
    live.call(live.operations.reload)
    assert live.wait_until(lambda gauges: live.system.config.limits.max_requests == 66, 5)
    file.write_text("[nonsense")
    live.call(live.operations.reload)
    time.sleep(0.05)
    assert live.system.config.limits.max_requests == 66
    file.write_text(BASE)


async def test_a_frontend_in_another_process_asks_the_engine() -> None:
    class Engine:
        def __init__(self) -> None:
            self.asked: list[Operate] = []

        def put(self, message: Operate) -> None:
            self.asked.append(message)

    engine = Engine()
    operations = RemoteOperations(engine)
    first = asyncio.create_task(operations.operate(Operate(what="apply", text="")))
    others = [asyncio.create_task(operations.operate(Operate(what="wake_up"))) for _ in range(MAX_ASKED - 1)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as refused:
        await operations.operate(Operate(what="sleep"))
    assert refused.value.status == 429
    operations.take(Operated(number=engine.asked[0].number, outcome=b"done"))
    operations.take(Operated(number=99, outcome=b"nobody asked"))
    for one in engine.asked[1:]:
        operations.take(Operated(number=one.number, error="kv.num_pages=3: too few", status=400))
    async with asyncio.timeout(far(5)):
        assert await first == b"done"
        for task in others:
            with pytest.raises(RequestError) as refused:
                await task
            assert (refused.value.status, refused.value.param) == (400, "kv.num_pages")
