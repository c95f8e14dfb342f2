"""``callboard bench league``: which servers take part, that they get the same in turns, and that they are ended."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from engine.config import Config
from engine.types.errors import CallboardError
from server.cli import main
from server.extensions.bench import league, llama_cpp
from server.extensions.bench.client import Record, Target
from server.extensions.bench.league import LeagueServers
from server.extensions.bench.loads import Conversation, LoadSizes, draw
from server.extensions.bench.run import run
from server.extensions.bench.server_process import ServerProcess

LLAMA = {"llama.cpp": ["llama-server"], "ik_llama.cpp": ["ik/llama-server"]}
DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
ANSWERING = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


class Fake:
    """A server that takes so much processor time for each request."""

    def __init__(self, name: str, cpu_s: float) -> None:
        self.url, self.pid, self._cpu_s, self.sent, self.closed = name, 0, cpu_s, [], 0  # type: ignore[var-annotated]

    def cpu_s(self) -> float:
        return self._cpu_s * sum(len(texts) for texts, _ in self.sent)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    fakes = {"slow": Fake("slow", 2.0), "fast": Fake("fast", 1.0)}
    monkeypatch.setattr(
        LeagueServers, "servers", lambda self, model: {name: lambda one=one: one for name, one in fakes.items()}
    )

    async def run(target: Target, load: list[Conversation], at_once: int) -> tuple[str, list[Record], float]:
        assert target.fields == league.FIELDS
        fakes[target.base_url].sent.append(([str(one.turns) for one in load], at_once))
        done = [Record(due_s=0.0, e2e_s=1.0, output_tokens=16, prompt_tokens=640) for _ in load]
        return "model", done, 4.0 if target.base_url == "slow" else 1.0

    monkeypatch.setattr(league, "run", run)
    return fakes


def entry(**changes: Any) -> LeagueServers:
    told = {
        "precisions": ["none", "int8"],
        "llama": LLAMA,
        "transformers": "/bin/false",
        "threads": 2,
        "most_streams": 8,
    }
    return LeagueServers(**told | changes)


def test_servers_get_the_same_texts_in_turns_and_are_compared_with_the_first(servers: dict[str, Fake]) -> None:
    rows = league.compete("some/model", entry(), ["short", "prompt"], [1, 8], 2)
    slow, fast = servers.values()
    assert slow.sent == fast.sent
    assert [(len(texts), at_once) for texts, at_once in slow.sent] == [(2, 1), *[(2, 1), (16, 8)] * 4]
    texts = [text for of_load, _ in slow.sent[1:] for text in of_load]
    assert len(set(texts)) == len(texts), "nothing of an earlier turn or load is cached"
    assert (slow.closed, fast.closed) == (1, 1)
    assert len(rows) == 8
    found = {(row["server"], row["load"], row["streams"]): row for row in rows}
    assert {row["x"] for row in rows if row["server"] == "slow"} == {1.0}
    assert {(row["x"], row["cpu_x"]) for row in rows if row["server"] == "fast"} == {(4.0, 2.0)}
    assert found["fast", "short", 8]["rate"] == 16 * 16
    assert found["fast", "prompt", 1]["rate"] == 2 * 640, "prompts count by their tokens"
    assert found["slow", "short", 8]["cpu_rate"] == 8.0


def test_a_request_that_fails_ends_the_league_and_its_servers(
    servers: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: object) -> tuple[str, list[Record], float]:
        return "model", [Record(due_s=0.0, error="400: no")], 1.0

    monkeypatch.setattr(league, "run", run)
    with pytest.raises(CallboardError, match=r"slow: 400: no, in the load 'short' at 1 streams"):
        league.compete("some/model", entry(), ["short"], [1], 1)
    assert [one.closed for one in servers.values()] == [1, 1]


def test_a_connection_that_breaks_once_is_no_result(servers: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = []

    async def run(target: Target, load: list[Conversation], at_once: int) -> tuple[str, list[Record], float]:
        sent.append([str(one.turns) for one in load])
        return "model", [Record(due_s=0.0, output_tokens=1, error="" if len(sent) > 1 else "closed")], 1.0

    monkeypatch.setattr(league, "run", run)
    assert len(league.compete("some/model", entry(), ["short"], [1], 1)) == 2
    assert sent[1] != sent[0], "nothing of the first attempt is cached"
    assert sent[1] != sent[2]
    assert sent[3] == sent[4]


def test_the_table_and_the_file_have_every_row(servers: dict[str, Fake], tmp_path: Path) -> None:
    rows = league.compete("some/model", entry(), ["short"], [1], 1)
    console = Console(record=True, width=100)
    league.show(rows, console)
    shown = console.export_text()
    assert "tokens/s (times slow;" in shown
    assert "32 (4.00; 2.00)" in shown
    league.write(rows, tmp_path / "league.json")
    assert json.loads((tmp_path / "league.json").read_text())["rows"] == rows


def test_a_picture_is_drawn(servers: dict[str, Fake], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'callboard[bench]'")
    league.plot(league.compete("some/model", entry(), ["short"], [1, 8], 1), tmp_path / "league.png")
    assert (tmp_path / "league.png").read_bytes().startswith(b"\x89PNG")


def test_the_kind_of_model_says_which_servers_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(entry().servers("a/tiny.gguf")) == ["llama.cpp", "ik_llama.cpp", "callboard none", "callboard int8"]
    assert list(entry(llama={}, precisions=["int8"]).servers("a/tiny.gguf")) == ["callboard int8"]
    assert list(entry().servers("a/checkpoint")) == ["callboard none", "callboard int8"]
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    assert list(entry().servers("a/checkpoint")) == ["vLLM", "callboard none", "callboard int8"]


def test_transformers_takes_part_where_its_interpreter_has_what_the_file_needs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *accelerate*) exit 1;; *"torch transformers") exit 0;; esac\nexit 1\n')
    python.chmod(0o755)
    one = entry(transformers=str(python), llama={}, precisions=["none"])
    assert list(one.servers(str(tmp_path))) == ["transformers", "callboard none"]
    assert list(one.servers("a/tiny.gguf")) == ["callboard none"]
    command, _ = one.servers(str(tmp_path))["transformers"].args  # type: ignore[attr-defined]
    assert command == [str(python), str(league.TRANSFORMERS), str(tmp_path), "8", "2"]


@pytest.mark.slow
async def test_transformers_answers_a_load_with_as_many_tokens_as_were_asked() -> None:
    start = entry(transformers=sys.executable).servers(str(DEMO))["transformers"]
    with closing(start()) as server:
        load = draw(6, LoadSizes(prompt=8, output=5), np.random.default_rng(0))
        name, records, _ = await run(Target(server.url, chat=False, fields=league.FIELDS), load, 4)
    assert name == "transformers"
    assert [(one.error, one.output_tokens, len(one.gaps_s)) for one in records] == [("", 5, 4)] * 6
    assert all(one.prompt_tokens >= 8 for one in records)


def test_a_binary_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "league", "tiny.gguf", "--ik-llama-server", "/nowhere/llama-server"])
    assert left.value.code == 2
    assert "--ik-llama-server /nowhere/llama-server: is no program that can be run" in capsys.readouterr().err


def test_what_serves_llama_cpp_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert llama_cpp.find("", sys.executable) == []
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    (tmp_path / "llama-server").chmod(0o755)
    assert llama_cpp.find("", sys.executable) == [str(tmp_path / "llama-server")]


def test_a_server_is_ready_when_its_route_answers_and_ends_when_it_is_closed() -> None:
    server = ServerProcess([sys.executable, "-c", ANSWERING], "/ready")
    try:
        assert server.cpu_s() > 0
    finally:
        server.close()
    assert not Path(f"/proc/{server.pid}").exists()


def test_a_server_that_ends_before_it_is_ready_is_an_error() -> None:
    with pytest.raises(CallboardError, match=r"a server did not come up: .* import sys"):
        ServerProcess([sys.executable, "-c", "import sys"], "/ready")


def test_the_commands_of_callboard_are_those_of_its_own_command_line() -> None:
    start = entry().servers("a/checkpoint")["callboard int8"]
    command, route = start.args  # type: ignore[attr-defined]
    assert route == "/ready"
    assert command[1:5] == ["-m", "callboard", "serve", "a/checkpoint"]
    assert command[5:] == ["--set", "model.quantization=int8", "--set", "device.threads=2", "--port"]
    assert Config().device.threads is not None
