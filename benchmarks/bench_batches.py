"""A server that is killed again and again under a batch and background responses: is every answer there, and the same?

A batch of completions (greedy, with seeds, without) and responses in the background are given to a server of the demo
model, whose process group gets SIGKILL at once.  Its folder is copied: one server goes on undisturbed with one copy,
another with the other while it gets SIGKILL so many times, each time after another share of the lines.  Every line
must have one answer, and every answer and response must equal the undisturbed one, byte for byte, but for the count of
cached tokens, which says what else has run.  What differs makes this script fail.

With --live N it measures instead how long N live requests, one at a time, wait for their first token while no batch
runs, and while one does.

    python benchmarks/bench_batches.py --lines 1000 --kills 20 --json benchmarks/results/batches_killed_2core_cpu.json
    python benchmarks/bench_batches.py --live 200 --json benchmarks/results/batches_live_2core_cpu.json
"""

import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import keep, new_parser

ENDED = ("completed", "failed", "cancelled", "expired")
MODEL = "callboard-demo"
JSON = {"Content-Type": "application/json"}
PATIENCE_S = 900.0
LOOK_EVERY_S = 0.05
INVARIANT = "model.numerics=invariant"  # near ties would be decided by what else runs otherwise


class ServerProcess:
    """``callboard serve demo`` on a storage folder, as a process group of its own."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        given = (f"server.port={self.port}", f"storage.folder={folder}", *settings)
        command = [sys.executable, "-m", "callboard", "serve", "demo", "--log-level", "warning"]
        self._process = subprocess.Popen(
            [*command, *(word for one in given for word in ("--set", one))],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] = JSON) -> bytes:
        """The body of an answer.  Raises OSError where there is no server, RuntimeError for an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            read = reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{method} {path}: {reply.status} {read[:300]!r}")
            return read
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the server has ended"
            try:
                self.ask("GET", "/ready")
            except (OSError, RuntimeError):
                time.sleep(LOOK_EVERY_S)
            else:
                return
        raise TimeoutError("the server is not ready")

    def upload(self, content: bytes) -> str:
        """The id of a file with this content."""
        mark = "callboard-part"
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
        ]
        body = "".join(parts).encode() + content + f"\r\n--{mark}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        return str(json.loads(self.ask("POST", "/v1/files", body, headers))["id"])

    def get(self, path: str) -> dict[str, Any]:
        """An object of the API."""
        found: dict[str, Any] = json.loads(self.ask("GET", path))
        return found

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Work:
    """A batch and responses that a server was given.  batch: its id.  responses: theirs."""

    def __init__(self, server: ServerProcess, num_lines: int, num_responses: int, num_tokens: int) -> None:
        self.num_lines = num_lines
        body = {"input_file_id": server.upload(batch_input(num_lines, num_tokens)), "completion_window": "24h"}
        self.batch = json.loads(server.ask("POST", "/v1/batches", {**body, "endpoint": "/v1/completions"}))["id"]
        asked = [
            {"model": MODEL, "input": f"What is a page? ({index})", "background": True, "temperature": index % 2}
            for index in range(num_responses)
        ]
        self.responses = [json.loads(server.ask("POST", "/v1/responses", one))["id"] for one in asked]

    def num_done(self, server: ServerProcess) -> int:
        """How many lines have their answers."""
        counts = server.get(f"/v1/batches/{self.batch}")["request_counts"]
        return int(counts["completed"] + counts["failed"])

    def has_ended(self, server: ServerProcess) -> bool:
        """Whether all of it has."""
        paths = [f"/v1/batches/{self.batch}", *(f"/v1/responses/{one}" for one in self.responses)]
        return all(server.get(path)["status"] in ENDED for path in paths)

    def results(self, server: ServerProcess) -> dict[str, Any]:
        """Name -> answer, of every line and every response.  Raises AssertionError unless each line has one."""
        batch = server.get(f"/v1/batches/{self.batch}")
        assert batch["status"] == "completed", batch
        found: dict[str, Any] = {}
        seen: Counter[str] = Counter()
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            for line in server.ask("GET", f"/v1/files/{file_id}/content").splitlines():
                answer = json.loads(line)
                seen[answer["custom_id"]] += 1
                found[answer["custom_id"]] = without_cached(answer)
        assert seen == Counter(f"line-{index}" for index in range(self.num_lines)), seen.most_common(5)
        for one in self.responses:
            found[one] = without_cached(server.get(f"/v1/responses/{one}"))
        return found


def batch_input(num_lines: int, num_tokens: int) -> bytes:
    """Lines of which a third is greedy, a third brings a seed, a third has the one that the server gives it."""
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1})
    lines = [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": MODEL if index % 50 else "another-model",  # its errors are answers too
                "prompt": f"def function_{index}(value):\n    ",
                "max_tokens": num_tokens,
                **kinds[index % 3],
            },
        }
        for index in range(num_lines)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def without_cached(answer: Any) -> Any:
    """An answer without how many tokens of its prompt were found in the cache."""
    if isinstance(answer, dict):
        return {name: without_cached(value) for name, value in answer.items() if name != "cached_tokens"}
    return [without_cached(one) for one in answer] if isinstance(answer, list) else answer


def undisturbed_and_killed(
    scratch: Path, num_lines: int, num_responses: int, num_kills: int, num_tokens: int
) -> dict[str, Any]:
    """Returns what was found.  Raises AssertionError for a line without its one answer."""
    server = ServerProcess(scratch / "calm", INVARIANT)
    server.wait_ready()
    work = Work(server, num_lines, num_responses, num_tokens)
    server.kill()
    shutil.copytree(scratch / "calm", scratch / "killed")
    calm, calm_s = _to_the_end(scratch / "calm", work)
    moments: list[int] = []
    for number in range(1, num_kills + 1):
        server = ServerProcess(scratch / "killed", INVARIANT)
        server.wait_ready()
        while (num_done := work.num_done(server)) < number * num_lines // (num_kills + 1):
            time.sleep(LOOK_EVERY_S)
        moments.append(num_done)
        server.kill()
    killed, _ = _to_the_end(scratch / "killed", work)
    differing = [name for name in calm if calm[name] != killed.get(name)]
    statuses = Counter(answer["response"]["status_code"] for name, answer in calm.items() if name.startswith("line"))
    return {
        "lines": num_lines,
        "responses": num_responses,
        "kills": num_kills,
        "lines_done_at_kills": moments,
        "statuses": {str(status): count for status, count in statuses.items()},
        "undisturbed_s": round(calm_s, 1),
        "differing": differing,
        "missing": sorted(set(calm) ^ set(killed)),
    }


def _to_the_end(folder: Path, work: Work) -> tuple[dict[str, Any], float]:
    server = ServerProcess(folder, INVARIANT)
    try:
        server.wait_ready()
        began = time.monotonic()
        while not work.has_ended(server):
            assert time.monotonic() < began + PATIENCE_S, "the work does not end"
            time.sleep(LOOK_EVERY_S)
        took_s = time.monotonic() - began
        return work.results(server), took_s
    finally:
        server.kill()


def live_beside_a_batch(scratch: Path, num_live: int, num_tokens: int) -> dict[str, Any]:
    """How long live requests wait for their first token, without a batch and beside one, in turns."""
    server = ServerProcess(scratch / "live")
    try:
        server.wait_ready()
        found: dict[str, list[float]] = {"alone": [], "beside a batch": []}
        for part in range(2):
            batch = ""
            if part % 2:
                content = batch_input(5000, num_tokens)
                body = {"input_file_id": server.upload(content), "completion_window": "24h"}
                batch = json.loads(server.ask("POST", "/v1/batches", {**body, "endpoint": "/v1/completions"}))["id"]
                while server.get(f"/v1/batches/{batch}")["request_counts"]["completed"] < 50:
                    time.sleep(LOOK_EVERY_S)
            for index in range(num_live):
                found["beside a batch" if batch else "alone"].append(first_token_s(server, part * num_live + index))
            if batch:
                assert server.get(f"/v1/batches/{batch}")["status"] == "in_progress", "the batch was too short"
                server.ask("POST", f"/v1/batches/{batch}/cancel")
                while server.get(f"/v1/batches/{batch}")["status"] != "cancelled":
                    time.sleep(LOOK_EVERY_S)
        return {
            name: {
                "requests": len(times),
                "ttft_ms_median": round(1e3 * statistics.median(times), 1),
                "ttft_ms_p95": round(1e3 * statistics.quantiles(times, n=20)[-1], 1),
                "ttft_ms_max": round(1e3 * max(times), 1),
            }
            for name, times in found.items()
        }
    finally:
        server.kill()


def first_token_s(server: ServerProcess, number: int) -> float:
    """Seconds until a stream's first event."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": MODEL, "prompt": f"import live_{number}\n", "max_tokens": 16, "stream": True, "temperature": 0}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    reply = connection.getresponse()
    reply.readline()
    took_s = time.perf_counter() - began
    reply.read()
    connection.close()
    return took_s


def main() -> None:
    """Run it, and fail where something differs."""
    parser = new_parser(__doc__)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--responses", type=int, default=10)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--live", type=int, default=0, help="measure so many live requests instead")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if given.live:
            result = live_beside_a_batch(scratch, given.live, given.tokens)
        else:
            result = undisturbed_and_killed(scratch, given.lines, given.responses, given.kills, given.tokens)
    print(json.dumps(result, indent=2))
    keep(given.output, result)
    if result.get("differing") or result.get("missing"):
        sys.exit("some answers differ")


if __name__ == "__main__":
    main()
