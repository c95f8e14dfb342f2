"""Seconds until a server is ready, and its memory then, beside llama.cpp's server.

Each server is a process of its own that is started, looked at when it is ready, and ended, in turns.  A first start has
an empty cache folder, as on a new machine; the second line has the least of the later ones.  Processor time is that of
all threads, children included: where others use the machine as well, the clock says little.

    python benchmarks/bench_start.py                                     # the demo model
    python benchmarks/bench_start.py --models demo real --llama-python VENV/bin/python  # the wheel xllamacpp
    python benchmarks/bench_start.py --models FILE.gguf --llama-server llama.cpp/build/bin/llama-server

Owns: the processes, the table.  Does not know: what takes the time; the server's log says it by stage.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llama_files
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from server.extensions.bench import llama_cpp

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "demo_model"
TICKS = os.sysconf("SC_CLK_TCK")
READY = " is ready after "
COLUMNS = ("model", "server", "start", "seconds", "processor_s", "resident_mb", "own_mb")


def callboard(path: Path, cache: str) -> dict[str, Any]:
    """One start of ``callboard serve``.  cache: the cache folder."""
    command = [sys.executable, "-m", "callboard", "serve", str(path), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has its modules as bytecode
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as one:
        try:
            assert one.stdout is not None
            next(line for line in one.stdout if READY in line)
            return {"seconds": time.perf_counter() - began, **used(one.pid)}
        finally:
            one.send_signal(signal.SIGTERM)


def llama(command: list[str], threads: int, path: Path, cache: str) -> dict[str, Any]:
    """One start of llama.cpp's server, which has no cache."""
    began = time.perf_counter()
    server = llama_cpp.LlamaServer(command, path, 8, 1024, threads)
    try:
        return {"seconds": time.perf_counter() - began, **used(server.pid)}
    finally:
        server.close()


def used(pid: int) -> dict[str, float]:
    """The processor time of a process and its children that have ended, its resident memory, and its own part of it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = {name: int(status[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon")}
    return {
        "processor_s": sum(map(int, fields[11:15])) / TICKS,
        "resident_mb": memory["VmRSS"],
        "own_mb": memory["RssAnon"],
    }


def measure(model: str, servers: dict[str, Callable[[str], dict[str, Any]]], turns: int) -> list[dict[str, Any]]:
    """Start each server once with an empty cache folder, then so many times with what that start has kept, in turns."""
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    with tempfile.TemporaryDirectory() as caches:
        for _ in tqdm(range(turns + 1), desc=model, leave=False):
            for name, start in servers.items():
                starts[name].append(start(f"{caches}/{name}"))
    rows = []
    for name, (first, *later) in starts.items():
        best = {column: min(one[column] for one in later) for column in first}
        rows.append({"model": model, "server": name, "start": "first", **first})
        rows.append({"model": model, "server": name, "start": f"later, least of {turns}", **best})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(*(column.replace("_", " ") for column in COLUMNS), title="Seconds until a server is ready, and MB")
    for row in rows:
        table.add_row(*(one if isinstance(one := row[column], str) else f"{one:.2f}" for column in COLUMNS))
    Console().print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"], help="demo, real, or paths (default: demo)")
    parser.add_argument("--turns", type=int, default=5, help="later starts of each (default: 5)")
    parser.add_argument("--llama-server", default="", help="llama.cpp's binary (default: of the PATH)")
    parser.add_argument("--llama-python", default=sys.executable, help="else an interpreter that has xllamacpp")
    arguments = parser.parse_args()
    command = llama_cpp.find(arguments.llama_server, arguments.llama_python)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as written:
        for model in arguments.models:
            path = {"demo": DEMO, "real": real_model()}.get(model, Path(model))
            servers: dict[str, Callable[[str], dict[str, Any]]] = {"callboard": partial(callboard, path)}
            if command and path.suffix != ".gguf":
                llama_files.write_gguf(path, Path(written) / f"{path.name}.gguf", "F32")
                path = Path(written) / f"{path.name}.gguf"
            if command:
                servers["llama.cpp"] = partial(llama, command, len(os.sched_getaffinity(0)), path)
            rows += measure(model, servers, arguments.turns)
    show(rows)
    keep(arguments.output, {"rows": rows})


def real_model() -> Path:
    """The file that ``make real`` fetches."""
    sys.path.insert(0, str(ROOT))
    from tests.real import model

    return model.path()


if __name__ == "__main__":
    main()
