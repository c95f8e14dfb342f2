"""What a request waits for a model that is not loaded, against a server of its own that is started for it.

The demo model twice in one server, with room for one: requests to the one and the other in turns, so each has to wait
until the other is unloaded and its own is loaded.  Then the same request to the model that is loaded.  Between them
``callboard serve`` of the demo model alone, from its start to the same answer.

    python benchmarks/bench_switch.py --rounds 5 --json benchmarks/results/switch_2core_cpu.json
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

TOML = """\
[kv]
num_pages = 256

[server]
models_memory_mb = 100

[[models]]
name = "one"
load = "demand"
memory_mb = 100

[[models]]
name = "other"
load = "demand"
memory_mb = 100
"""
BODY = {"prompt": "def fibonacci(n):", "max_tokens": 1, "temperature": 0}


class Server:
    """``callboard serve`` as a process, which listens when this returns; a context manager."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "callboard", "serve", "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> "Server":
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = [word.rstrip(";") for word in line.split() if word.startswith("http://")]
            if found:
                self.url = found[0]
                return self
        raise RuntimeError("the server ended before it listened")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def ask(self, model: str) -> float:
        """Seconds to the answer."""
        body = json.dumps({"model": model, **BODY}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", body, {"Content-Type": "application/json"})
        started = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            response.read()
        return time.perf_counter() - started


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"switch": [], "loaded": [], "own server": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "several.toml"
        file.write_text(TOML)
        with Server(str(file)) as several:
            several.ask("other")
            for _ in range(arguments.rounds):
                for model in ("one", "other"):
                    seconds["switch"].append(several.ask(model))
                    seconds["loaded"].append(several.ask(model))
                started = time.perf_counter()
                with Server("--set", "kv.num_pages=256", "--model", "demo") as alone:
                    alone.ask("callboard-demo")
                    seconds["own server"].append(time.perf_counter() - started)
    base = statistics.median(seconds["own server"])
    table = Table("a request", "least", "median", "over a server of its own")
    for name, values in seconds.items():
        median = statistics.median(values)
        table.add_row(name, f"{min(values):.3f} s", f"{median:.3f} s", f"{median / base:.3f}")
    Console().print(table)
    keep(arguments.output, {"seconds": seconds})


if __name__ == "__main__":
    main()
