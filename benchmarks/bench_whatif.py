"""Does ``callboard whatif`` say what a server with other settings really does?

Records a server under an open loop, predicts it with each of several changes, then runs a server with each change under
the same load, and compares the times to the first token.  Runs take turns, so that all see about the same machine: in
each round predictions are made from that round's recording, and the ratio is the median over rounds.
The whole server is real, and so is what sends requests.  With ``--device paced`` steps take what a formula says, so
that what else the machine does hardly shows: max(32 ms + 0.4 us for each token of context, 0.24 ms for each token
computed) + 0.6 ms for each row, +- 5 %, which is no sum of the terms that are learnt.  With ``--device model`` the demo
model computes, and figures are as noisy as the machine.

    python benchmarks/bench_whatif.py                       # eight minutes
    python benchmarks/bench_whatif.py --device model --rate 30 --rounds 5 --output results.json
"""

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from echo_executor import TimedRunner
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from simulation import num_sampled

from engine.config import Config
from engine.features.traffic.sizes import StepSize, StepSizes
from engine.features.traffic.trace import Trace, read_trace
from engine.messages import Step, StepDone
from server.extensions.bench.client import Target
from server.extensions.bench.loads import LoadSizes, arrivals, draw, due
from server.extensions.bench.report import summarise
from server.extensions.bench.run import run
from server.extensions.whatif.changes import as_recorded, changed
from server.extensions.whatif.costs import StepCosts
from server.extensions.whatif.figures import predicted, recorded
from server.extensions.whatif.replay import TraceReplay, stand_ins

BASE = {
    "kv.num_pages": 1200,
    "scheduler.max_running": 32,
    "scheduler.max_step_tokens": 1024,
    "model.max_model_len": 2048,
}
CASES = (
    ("kv.num_pages=300",),
    ("scheduler.max_running=12",),
    ("scheduler.max_step_tokens=128", "scheduler.prefill_chunk=64"),
    ("plugins.policy=lpm",),
)
COMPARED = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "output_tokens_per_s", "hit_rate")
READY_S = 60.0


def formula(size: StepSize) -> float:
    """Seconds that a paced device takes for a step."""
    computed = 240e-6 * (size.decodes + size.prefill_tokens)
    return max(32e-3 + 4e-7 * (size.context + size.pairs), computed) + 600e-6 * (size.decodes + size.prefills)


def paced_runner(num_pages: int, max_running: int, token: int) -> TimedRunner:
    """A device with the times of ``formula``, nearly, whose rows all sample one token."""
    sizes, rng = StepSizes(max_running), np.random.default_rng(0)

    def answer(step: Step) -> StepDone:
        tokens = np.full(num_sampled(step), token, dtype=np.int32)
        return StepDone(rank=0, step_id=step.step_id, token_ids=tokens.tobytes())

    return TimedRunner(num_pages, answer, lambda step: formula(sizes.measure(step)) * float(rng.lognormal(0.0, 0.05)))


def serve_paced(arguments: list[str]) -> None:
    """``callboard serve`` on such a device."""
    import engine.control.system
    from server.cli import main

    class PacedSystem(engine.control.system.System):
        def _load_runner(self, *_: Any) -> Any:
            config: Config = self.config
            token = int(self.codec.encode(" return")[-1])
            return paced_runner(config.kv.num_pages, config.scheduler.max_running, token)

    engine.control.system.System = PacedSystem  # type: ignore[misc]
    main(["serve", *arguments])


def record(arguments: argparse.Namespace, changes: tuple[str, ...]) -> tuple[Trace, dict[str, float]]:
    """A server with these changes under the load: its trace, and what the client saw."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*(f"{key}={value}" for key, value in BASE.items()), *changes]
        settings += [f"storage.folder={folder}", "storage.trace_mb=200"]
        given = [part for one in settings for part in ("--set", one)]
        entry = [__file__, "--serve-paced"] if arguments.device == "paced" else ["-m", "server.cli", "serve"]
        port = free_port()
        command = [sys.executable, *entry, "demo", "--port", str(port), "--log-level", "warning", *given]
        server = subprocess.Popen(command)
        try:
            figures = asyncio.run(load(arguments, f"http://127.0.0.1:{port}"))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        (path,) = Path(folder, "traces").iterdir()
        return read_trace(path), figures


def free_port() -> int:
    """Return a port on which no process listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def load(arguments: argparse.Namespace, url: str) -> dict[str, float]:
    """Send the load, which is always the same, and return the client's figures."""
    import aiohttp

    deadline = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError("the server does not get ready")
            await asyncio.sleep(0.1)
    rng = np.random.default_rng(0)
    sizes = LoadSizes(prompt=100, output=40, variation=0.6, prefix=120, groups=24)
    conversations = draw(arguments.requests, sizes, rng)
    times = arrivals(len(conversations), arguments.rate, 1, rng)
    target = Target(url, fields={"ignore_eos": True})
    _, records, seconds = await run(target, due(conversations, times), 0)
    figures, errors = summarise(records, seconds, {})
    if errors:
        raise RuntimeError(f"requests failed: {errors}")
    return figures


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case: what was predicted, what was, in each round."""
    rows: list[dict[str, Any]] = [
        {"changes": " ".join(case), "real": [], "predicted": [], "client": []} for case in ((), *CASES)
    ]
    for number in range(arguments.rounds):
        for row, case in zip(rows, ((), *CASES), strict=True):
            trace, client = record(arguments, case)
            if not case:
                before, costs, tokens = trace, StepCosts(trace.steps), stand_ins(trace.requests, trace.head)
            asked = changed(before.head, case) if case else as_recorded(before.head)
            replayed = TraceReplay(asked, before.requests, tokens, costs.seconds).run()
            for found, said in ((recorded(trace), "real"), (predicted("", "", replayed, costs), "predicted")):
                row[said].append({name: found.figures[name] for name in (*COMPARED, "retractions")})
            row["client"].append({name: client[name] for name in ("ttft_p50_ms", "ttft_p99_ms")})
            seen = f"real {row['real'][-1]}, predicted {row['predicted'][-1]}"
            print(f"round {number}: {row['changes'] or 'as it was'}: {seen}", file=sys.stderr, flush=True)
    for row in rows:
        pairs = [*zip(row["predicted"], row["real"], strict=True)]
        row["ratio"] = {
            name: round(statistics.median(said[name] / found[name] for said, found in pairs), 3) for name in COMPARED
        }
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Predicted and real of each round, and their ratio."""
    for name in COMPARED:
        table = Table("changes", "predicted", "real", "predicted / real", title=name)
        for row in rows:
            cells = (" ".join(f"{one[name]:,.1f}" for one in row[side]) for side in ("predicted", "real"))
            table.add_row(row["changes"] or "as it was", *cells, f"{row['ratio'][name]:.2f}")
        Console().print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", choices=["paced", "model"], default="paced")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=18.0, help="requests a second (default: 18)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = measure(arguments)
    show(rows)
    keep(arguments.output, {"arguments": {key: str(value) for key, value in vars(arguments).items()}, "rows": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve-paced"]:
        serve_paced(sys.argv[2:])
    else:
        main()
