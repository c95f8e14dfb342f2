"""``callboard bench league``: servers of one model beside each other, in turns, each by its API like OpenAI's.

Owns: which servers, which loads, the turns, the table.  Does not know: events of a stream, statistics.
The servers of a model live at the same time, and one of them is loaded at a time.  Processor time is the server's, so
what the client takes, and what a neighbour of the machine takes, do not count in it.
"""

import asyncio
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.types.errors import CallboardError
from server.extensions.bench import llama_cpp
from server.extensions.bench.client import Target
from server.extensions.bench.loads import LoadSizes, draw
from server.extensions.bench.machine import describe_machine
from server.extensions.bench.report import summarise
from server.extensions.bench.run import run
from server.extensions.bench.server_process import ServerProcess

SLOT_TOKENS = 2048
ATTEMPTS = 3  # a server that refuses a connection while it is busy is no result
TRANSFORMERS = Path(__file__).with_name("transformers_server.py").resolve()
OF_GGUF = ("accelerate", "gguf")  # which transformers needs to read such a file
LOADS = {
    "short": LoadSizes(prompt=32, output=16),
    "long": LoadSizes(prompt=32, output=128),
    "prefix": LoadSizes(prompt=32, output=32, prefix=512),
    "prompt": LoadSizes(prompt=640, output=2),
}
FIELDS = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class LeagueServers:
    """The servers of a league.  precisions: of callboard.  llama: commands that serve as ``llama-server``, by name.

    transformers: an interpreter that may have it."""

    precisions: Sequence[str]
    llama: dict[str, list[str]]
    transformers: str
    threads: int
    most_streams: int

    def servers(self, model: str) -> dict[str, Callable[[], ServerProcess]]:
        """Return what starts each server that can serve the model: name with its precision -> function."""
        found: dict[str, Callable[[], ServerProcess]] = {}
        if Path(model).suffix == ".gguf":
            shape = self.most_streams, SLOT_TOKENS, self.threads
            for name, command in self.llama.items():
                found[name] = partial(llama_cpp.LlamaServer, command, Path(model), *shape)
        elif (vllm := shutil.which("vllm")) is not None:
            told = ["--max-model-len", str(SLOT_TOKENS), "--max-num-seqs", str(self.most_streams), "--port"]
            found["vLLM"] = partial(ServerProcess, [vllm, "serve", model, *told], "/health")
        if _has_transformers(self.transformers, [] if Path(model).is_dir() else OF_GGUF):
            told = [str(TRANSFORMERS), model, str(self.most_streams), str(self.threads)]
            found["transformers"] = partial(ServerProcess, [self.transformers, *told], "/v1/models")
        for precision in self.precisions:
            sets = [f"model.quantization={precision}", f"device.threads={self.threads}"]
            told = [one for setting in sets for one in ("--set", setting)]
            command = [sys.executable, "-m", "callboard", "serve", model, *told, "--port"]
            found[f"callboard {precision}"] = partial(ServerProcess, command, "/ready")
        return found


def _has_transformers(python: str, more: Sequence[str]) -> bool:
    """Whether an interpreter can serve with transformers, which needs more packages for some files."""
    script = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    command = [python, "-c", script, "torch", "transformers", *more]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compete(
    model: str, entry: LeagueServers, loads: Sequence[str], streams: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Return a row for each server and load.  rate: tokens a second; x: times the first server's, turn by turn."""
    cases = [(load, at_once) for load in loads for at_once in streams]
    rates: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    with ExitStack() as started:
        servers: dict[str, ServerProcess] = {}
        for name, start in entry.servers(model).items():
            servers[name] = start()
            started.callback(servers[name].close)
        first, *_ = servers
        for turn in range(turns + 1):
            for load, at_once in cases if turn else cases[:1]:
                for name, server in servers.items():
                    measured = _rates(server, load, at_once, turn)
                    if turn:
                        rates.setdefault((name, load, at_once), []).append(measured)
    rows = []
    for (name, load, at_once), mine in rates.items():
        ratios = [
            [one[clock] / other[clock] for one, other in zip(mine, rates[first, load, at_once], strict=True)]
            for clock in (0, 1)
        ]
        row = {"model": model, "server": name, "load": load, "streams": at_once}
        row |= {"rate": statistics.median(wall for wall, _ in mine), "x": statistics.median(ratios[0])}
        row |= {"cpu_rate": statistics.median(cpu for _, cpu in mine), "cpu_x": statistics.median(ratios[1])}
        rows.append(row)
    return rows


def _rates(server: ServerProcess, load: str, at_once: int, turn: int) -> tuple[float, float]:
    """Return the tokens a second, and the tokens of a second of the server's processor time: of answers, or of prompts
    for the load of prompts.

    Every server gets the same texts in a turn, and others in each turn and in each attempt."""
    target = Target(server.url, chat=False, fields=dict(FIELDS), reuses=False)
    for attempt in range(ATTEMPTS):
        texts = draw(2 * at_once, LOADS[load], np.random.default_rng([attempt, turn, at_once, *load.encode()]))
        before = server.cpu_s()
        _, records, seconds = asyncio.run(run(target, texts, at_once))
        figures, errors = summarise(records, seconds, {})
        if not errors:
            break
    else:
        raise CallboardError(f"{server.url}: {next(iter(errors))}, in the load {load!r} at {at_once} streams")
    num_tokens = figures["prompt_tokens" if load == "prompt" else "output_tokens"]
    return num_tokens / seconds, num_tokens / max(server.cpu_s() - before, 1e-3)


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table for each model: tokens a second, how many times those of the first server, the same by CPU time."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        cases = list(dict.fromkeys((row["load"], row["streams"]) for row in mine))
        title = f"{Path(model).name}: tokens/s (times {mine[0]['server']}; by processor time)"
        table = Table("server", *(f"{load} at {streams}" for load, streams in cases), title=title)
        for name in dict.fromkeys(row["server"] for row in mine):
            cells = [f"{row['rate']:.4g} ({row['x']:.2f}; {row['cpu_x']:.2f})" for row in mine if row["server"] == name]
            table.add_row(name, *cells)
        console.print(table)


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the rows and the machine as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": describe_machine(), "rows": rows}), indent=1))


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw how many times the first server's tokens a second each has, by load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(len(models), 1, figsize=(10, 4 * len(models)), squeeze=False, layout="constrained")
    for axis, model in zip(axes[:, 0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        cases = list(dict.fromkeys((row["load"], row["streams"]) for row in mine))
        names = list(dict.fromkeys(row["server"] for row in mine))
        for number, name in enumerate(names):
            places = [at + number * 0.8 / len(names) for at in range(len(cases))]
            axis.bar(places, [row["x"] for row in mine if row["server"] == name], 0.8 / len(names), label=name)
        axis.set_xticks(range(len(cases)), [f"{load} at {streams}" for load, streams in cases], rotation=20)
        axis.axhline(1.0, color="black", linewidth=0.5)
        axis.set(title=Path(model).name, ylabel=f"tokens/s, times {names[0]}")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
