"""``callboard serve`` with [[models]]: real engines in processes of their own, asked, unloaded, killed and drained."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from engine.llm import LLM
from engine.types.params import SamplingParams
from server.extensions.models.configuration import read_several
from tests.models.checkpoints import build, random_tokens, save
from tests.pace import far
from tests.server.http_client import RawClient, http_bytes

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "several.toml"
# The example's first model takes a few hundred MB as measured: there is room for it and one of the two behind it.
CHEAP = ["device.threads=1", "device.seed=1", "plugins.linear=torch", "plugins.race_s=0", "kv.num_pages=160"]
BUDGET = ["server.models_memory_mb=1900", "server.client_timeout_s=600", "server.drain_timeout_s=600"]
MORE = """
[[models]]
name = "{0}"
load = "demand"
memory_mb = 1000
[models.model]
path = "{0}"
tokenizer = "none"
"""
PROMPT = random_tokens(20, 5)
STREAM = {"prompt": "def add(", "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "stream": True}
STREAM["stream_options"] = {"include_usage": True}  # a reader that is slow gets several tokens in one event


class Served:
    """The server as a process.  file: its configuration."""

    def __init__(self, file: Path) -> None:
        self.log = file.parent / "log"
        command = [sys.executable, "-m", "callboard", "serve", str(file), "--port", "0"]
        command += [part for one in CHEAP + BUDGET for part in ("--set", one)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().partition(";")[0].split()[-1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=far(60))

    def loaded(self) -> list[str]:
        return [one.id for one in self.client.models.list() if one.model_extra["loaded"]]

    def tokens(self, model: str, num_tokens: int = 8, kill_after: int = 0) -> list[int]:
        """Greedy, from a stream.  kill_after: how many events are read before its process is killed."""
        tokens = []
        chunks = self.client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=num_tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        for number, chunk in enumerate(chunks):
            tokens += chunk.choices[0].token_ids or []
            if number + 1 == kill_after:
                os.kill(self.process_of(model), signal.SIGKILL)
        return tokens

    def process_of(self, model: str) -> int:
        """The process that has loaded it last."""
        return int(re.findall(rf"process (\d+) loads {model}\n", self.log.read_text())[-1])

    def hold(self, model: str, **fields: object) -> RawClient:
        """A client that has the beginning of a long stream and reads no more of it for now."""
        client = RawClient(int(self.url.rsplit(":", 1)[1]), receive_buffer=4096, timeout_s=60)
        client.send(http_bytes("POST", "/v1/completions", json.dumps({"model": model, **STREAM, **fields}).encode()))
        head = client.read_until(b"\r\n\r\n")
        assert b" 200 " in head, head
        client._buffer = head + client._buffer
        return client


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    for name in ("llama", "qwen3"):
        save(build(name), folder / name)
    path = folder / "several.toml"
    path.write_text(EXAMPLE.read_text() + MORE.format("llama") + MORE.format("qwen3"))
    return path


@pytest.fixture(scope="module")
def served(file: Path) -> Iterator[Served]:
    one = Served(file)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


def test_an_idle_model_leaves_for_another_while_a_stream_goes_on(served: Served, file: Path) -> None:
    with served.hold("demo") as stream:
        found = {name: served.tokens(name) for name in ("llama", "qwen3")}
        assert served.loaded() == ["demo", "qwen3"]
        *_, usage, done = stream.read_reply().events
        assert (usage["usage"]["completion_tokens"], done) == (STREAM["max_tokens"], "[DONE]")
    configuration = read_several(file, CHEAP, {})
    assert configuration is not None
    for one in configuration.models:
        if one.table.name in found:
            with LLM(config=one.config, progress=False) as llm:
                (alone,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
            assert found[one.table.name] == alone.token_ids


def test_the_official_client_chooses_by_name(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "What is a page?"}], max_tokens=8, temperature=0
    )
    assert (answer.model, answer.usage.completion_tokens) == ("demo", 8)
    with pytest.raises(openai.NotFoundError, match="this server has 'demo', 'demo-int8', 'llama', 'qwen3'"):
        served.client.completions.create(model="other", prompt="p")
    (line,) = [line for line in served.log.read_text().splitlines() if f"request={answer._request_id} " in line]
    assert line.endswith(" completion_tokens=8 replica=demo"), "its process has no line of its own"


def test_the_page_offers_all_and_shows_the_one_that_is_chosen(served: Served) -> None:
    browser_tab = pytest.importorskip("tests.server.browser_tab")
    if browser_tab.EXECUTABLE is None:
        pytest.skip("there is no Chromium")
    with browser_tab.launched() as browser, browser_tab.Tab(browser, served.url) as page:
        expect = browser_tab.playwright.expect
        expect(page.locator("#status")).to_have_text("ready", timeout=60_000)
        page.get_by_label("Which model").select_option("demo-int8")
        expect(page.locator("#status")).to_have_text("not loaded", timeout=60_000)
        page.get_by_label("Which model").select_option("demo")
        expect(page.locator("#status")).to_have_text("ready", timeout=60_000)
        assert page.locator("#models option").all_text_contents() == ["demo", "demo-int8", "llama", "qwen3"]


def test_a_stream_outlives_its_killed_process_and_others_do_not_notice(served: Served) -> None:
    undisturbed = served.tokens("qwen3", 300)
    with served.hold("demo") as other:
        assert served.tokens("qwen3", 300, kill_after=5) == undisturbed
        assert other.read_reply().events[-1] == "[DONE]"
    assert "qwen3 is lost" in served.log.read_text() or "qwen3: its process" in served.log.read_text()


def test_sigterm_lets_streams_end_and_then_every_process(served: Served) -> None:
    processes = re.findall(r"process (\d+) loads", served.log.read_text())
    with served.hold("demo", max_tokens=400) as stream:
        served.process.send_signal(signal.SIGTERM)
        assert stream.read_reply().events[-1] == "[DONE]"
    assert served.process.wait(far(30)) == 0, served.log.read_text()
    assert not [number for number in processes if Path(f"/proc/{number}").exists()]
