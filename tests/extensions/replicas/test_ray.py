"""Two engines as Ray actors behind the router: prefixes stay together, a killed one loses nothing and comes back."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self

import pytest

from tests.pace import far
from tests.ports import free_port
from tests.server.http_client import as_operator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'callboard[ray]'"),
]
DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"
SHARED = "def quick_sort(values):\n    if len(values) < 2:\n        return values\n    pivot = values[0]\n" * 4


class Router:
    """``callboard serve --replicas 2`` as a process."""

    def __init__(self, *more: str, **environment: str) -> None:
        command = [sys.executable, "-m", "server.cli", "serve", str(DEMO), "--port", "0", "--replicas", "2"]
        command += ["--set", "kv.num_pages=512", *more]
        given = {**os.environ, **environment}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=given)
        assert self.process.stdout is not None
        self.said: list[str] = []
        url = None
        try:
            while url is None:
                line = self.process.stdout.readline()
                assert line, "".join(self.said)
                self.said.append(line)
                url = re.search(r"http://127\.0\.0\.1:\d+", line)
        except AssertionError:
            self.process.stdout.close()
            self.process.wait(far(60))
            raise
        self.url = url[0]
        self._reading = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reading.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            self.said.extend(lines)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(far(60))
        self._reading.join(far(60))
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(far(60))
        self._reading.join(far(60))

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json", **as_operator()}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=far(120)) as response:
            return json.load(response)

    def wait_for(self, num_ready: int, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + far(timeout_s)
        while [one["state"] for one in self.ask("/replicas")["replicas"]].count("ready") != num_ready:
            assert time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.1)


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with Router() as running:
        running.wait_for(2)
        yield running
        assert running.stop() == 0, "".join(running.said)


def complete(router: Router, prompt: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = {"model": "callboard-demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return router.ask("/v1/completions", {**body, **more})


def sent(router: Router) -> list[int]:
    return [one["sent_requests"] for one in router.ask("/replicas")["replicas"]]


def test_a_shared_prefix_is_computed_once(router: Router) -> None:
    before = sent(router)
    cached = [
        complete(router, f"{SHARED}# {number}\n")["usage"]["prompt_tokens_details"]["cached_tokens"]
        for number in range(8)
    ]
    grown = sorted(after - one for after, one in zip(sent(router), before, strict=True))
    assert grown == [0, 8]
    assert cached[0] == 0
    assert all(count >= 64 for count in cached[1:])


def test_killing_one_loses_no_request(router: Router) -> None:
    pids = [one for one in _engine_pids() if one]
    assert len(pids) == 2
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, router, f"# {number}\n{SHARED}", 120) for number in range(16)]
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGKILL)
        answers = [one.result() for one in asked]
    assert all(answer["usage"]["completion_tokens"] == 120 for answer in answers)
    router.wait_for(2)
    assert sum(one["lost"] for one in router.ask("/replicas")["replicas"]) == 1


def stream(router: Router, prompt: str, max_tokens: int) -> str:
    """The text of a stream.  Raises KeyError for one that ends with an error."""
    body = {"model": "callboard-demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    request = urllib.request.Request(router.url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=far(120)) as response:
        events = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_killing_one_loses_no_stream(router: Router) -> None:
    prompts = [f"# {number}\n{SHARED}" for number in range(40)]
    whole = [stream(router, prompt, 8) for prompt in prompts]
    lost_before = sum(one["lost"] for one in router.ask("/replicas")["replicas"])
    with ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(stream, router, prompt, 120) for prompt in prompts]
        time.sleep(1.0)
        os.kill(next(one for one in _engine_pids() if one), signal.SIGKILL)
        texts = [one.result() for one in asked]
    assert all(text.startswith(start) for text, start in zip(texts, whole, strict=True))
    router.wait_for(2)
    assert sum(one["lost"] for one in router.ask("/replicas")["replicas"]) == lost_before + 1


def test_all_are_restarted_in_turn_while_requests_are_answered(router: Router) -> None:
    before = set(_engine_pids())
    assert router.ask("/replicas/restart", {})["restarting"] == ["replica0", "replica1"]
    deadline = time.monotonic() + far(120)
    while set(_engine_pids()) & before or len(_engine_pids()) != 2:
        assert complete(router, "def f(x):")["usage"]["completion_tokens"] == 16
        assert time.monotonic() < deadline
    router.wait_for(2)


def test_one_can_be_drained(router: Router) -> None:
    router.ask("/replicas/replica1/drain", {})
    deadline = time.monotonic() + far(60)
    while router.ask("/replicas")["replicas"][1]["state"] != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert complete(router, "def f(x):")["usage"]["completion_tokens"] == 16
    router.ask("/replicas/replica1/undrain", {})
    router.wait_for(2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Ray cluster that no router has started, as variables that lead to it."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    port = str(free_port())
    start = [*ray, "start", "--head", "--port", port, "--num-cpus", "2", "--include-dashboard", "false"]
    start += ["--min-worker-port", "0", "--max-worker-port", "0"]  # else 10002 to 19999, where the port may lie
    # A new Ray asks for a token where one lies in the home folder, but a process that joins sends it only if told to.
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    folder = str(Path("/tmp") / f"ray-{os.getpid()}")
    subprocess.run([*start, "--temp-dir", folder], check=True, capture_output=True, env={**os.environ, **access})
    try:
        yield {"RAY_ADDRESS": f"127.0.0.1:{port}", "CALLBOARD_PLACEMENT__CLUSTER_KEY": "k" * 32, **access}
    finally:
        subprocess.run([*ray, "stop", "--force"], check=True, capture_output=True)


def test_sessions_stay_where_they_are_when_one_of_two_routers_is_killed(cluster: dict[str, str]) -> None:
    with ExitStack() as routers:
        one, other = (routers.enter_context(Router("--fleet", "shared", **cluster)) for _ in range(2))
        for router in (one, other):
            router.wait_for(2)
        pids = set(_engine_pids())
        assert len(pids) == 2, "both have the same replicas"
        sessions = [f"# {number}\n{SHARED}" for number in range(6)]
        for number, prompt in enumerate(sessions):
            complete((one, other)[number % 2], prompt, session_id=f"s{number}")
        for number, prompt in enumerate(sessions):  # each at the router that has not seen it
            usage = complete((other, one)[number % 2], prompt + "x = 1\n", session_id=f"s{number}")["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 64, number
        one.process.kill()
        one.process.wait(far(60))
        for number, prompt in enumerate(sessions):
            usage = complete(other, prompt + "x = 1\ny = 2\n", session_id=f"s{number}")["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 64, number
        assert set(_engine_pids()) == pids
        late = routers.enter_context(Router("--fleet", "shared", **cluster))
        late.wait_for(2)
        assert late.ask("/replicas/replica0/drain", {})["state"] == "draining"
        other.wait_for(1)
        late.wait_for(1)
        late.ask("/replicas/replica0/undrain", {})
        for router in (other, late):  # the one that did not start it finds it too
            router.wait_for(2)
        assert late.stop() == other.stop() == 0
        assert len(_engine_pids()) == 2, "replicas outlive their routers"
        with pytest.raises(AssertionError, match="runs with other settings"):
            Router("--fleet", "shared", "--set", "scheduler.max_running=3", **cluster)


def _engine_pids() -> list[int]:
    """Processes that Ray named after the actor's class."""
    listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if re.search(r"\bray::EngineReplica", line)]
