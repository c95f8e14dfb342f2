"""llguidance is not installed: a server starts, serves what needs no grammar, and says what to install to what does."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.plugins import declaration
from engine.plugins.manager import Plugins
from engine.types.errors import PluginError, RequestError
from engine.types.params import Grammar
from server.extensions.doctor.doctor import examine
from tests.pace import far
from tests.server.engine_server import EngineServer
from tests.server.http_client import ask
from tests.workers.executors import within
from tests.workers.server import MODEL, ROOT, Server

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
SAID = r"needs llguidance, which is not installed; install it.*\(pip install llguidance, or name another in plugins"


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = declaration._installed
    monkeypatch.setattr(declaration, "_installed", lambda name: name != "llguidance" and installed(name))


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """The environment of processes whose llguidance cannot be imported, as a wheel for another machine."""
    (tmp_path / "llguidance").mkdir()
    (tmp_path / "llguidance" / "__init__.py").write_text("raise ImportError('a wheel for another machine')\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.usefixtures("absent")
def test_it_is_the_error_of_the_requests_that_need_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), EngineServer(model={"name": "demo"}) as served:
        (warning,) = [record.getMessage() for record in caplog.records if "llguidance" in record.getMessage()]
        assert warning.startswith("requests with a grammar are refused: plugin grammar.llguidance ")

        def chat(**fields: object) -> tuple[int, dict]:
            body = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, **fields}
            reply = ask(served.port, "POST", "/v1/chat/completions", body)
            return reply.status, reply.json

        for _ in range(2):
            assert chat()[0] == chat(tools=[TOOL])[0] == 200
            for fields in ({"guided_regex": "a"}, {"tools": [TOOL], "tool_choice": "required"}):
                for stream in (False, True):
                    status, answer = chat(stream=stream, **fields)
                    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
                    assert "pip install llguidance" in answer["error"]["message"]
        assert len([record for record in caplog.records if "llguidance" in record.getMessage()]) == 1


@pytest.mark.usefixtures("absent")
def test_from_python_too() -> None:
    with LLM(progress=False, config={"kv": {"num_pages": 64}}) as llm:
        with pytest.raises(RequestError, match=SAID):
            llm.generate("x", SamplingParams(max_tokens=4, grammar=Grammar("regex", "[ab]{3}")))
        assert llm.generate("x", SamplingParams(max_tokens=4))[0].token_ids


@pytest.mark.usefixtures("absent")
def test_what_was_named_fails_at_the_start() -> None:
    with pytest.raises(PluginError, match="needs llguidance, which is not installed; install it"):
        Plugins({"grammar": "llguidance"})
    with pytest.raises(PluginError, match="named 'outlines'"):
        Plugins({"grammar": "outlines"})


@pytest.mark.usefixtures("absent")
def test_the_doctor_notes_it_and_a_start_would_not_fail() -> None:
    def verdict(grammar: str) -> tuple[str, str]:
        config = build_config(Config(), {"server": {"port": 0}, "plugins": {"grammar": grammar}})
        (one,) = [found for found in examine(config) if found.what == "plugin grammar.llguidance"]
        return one.verdict, one.advice

    assert verdict("auto")[0] == "note"
    assert "pip install llguidance" in verdict("auto")[1]
    assert verdict("llguidance")[0] == "bad"


PLACEMENTS = {
    "one process": ["placement.executor=inline"],
    "an executor process": ["placement.executor=process"],
    "tokenizer processes": ["placement.executor=process", "placement.tokenizers=1"],
    "a frontend process": ["placement.executor=inline", "placement.ingress=process"],
}


@pytest.fixture(params=PLACEMENTS)
def server(request: pytest.FixtureRequest, broken: dict[str, str]) -> Iterator[Server]:
    with Server(*PLACEMENTS[request.param], env=broken) as server:
        yield server
        assert server.end(signal.SIGTERM)[0] == 0


def test_a_library_that_cannot_be_imported_is_the_same_wherever_it_is_needed(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    plain = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    within(30, server.ready)  # a frontend process learns later than its parent that the engine is
    for _ in range(2):
        assert ask(port, "POST", "/v1/completions", plain).status == 200
        reply = ask(port, "POST", "/v1/completions", {**plain, "guided_regex": "a"})
        assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
        assert "cannot be imported: a wheel for another machine (pip install llguidance" in reply.error["message"]
    assert server.logged().count("requests with a grammar are refused") == 1


def test_offline_with_an_executor_process(broken: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json\n"
        "from callboard import LLM, Grammar, SamplingParams\n"
        "with LLM(config={'kv': {'num_pages': 128}, 'placement': {'executor': 'process'}}, progress=False) as llm:\n"
        "    try:\n"
        "        llm.generate('x', SamplingParams(max_tokens=4, grammar=Grammar('regex', 'a')))\n"
        "    except Exception as error:\n"
        "        said = [type(error).__name__, str(error)]\n"
        "    print(json.dumps([*said, len(llm.generate('x', SamplingParams(max_tokens=4))[0].token_ids)]))\n"
    )
    environment = {**os.environ, **broken, "XDG_RUNTIME_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=far(120)
    )
    assert ended.returncode == 0, ended.stderr
    kind, message, num_tokens = json.loads(ended.stdout)
    assert (kind, num_tokens) == ("RequestError", 4)
    assert "pip install llguidance" in message
