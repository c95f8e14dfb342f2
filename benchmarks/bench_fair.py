"""What do others notice of a tenant that asks for ten times as much as each of them, under each policy?

Four tenants ask for what fills a quarter, a half, or three quarters of the engine; then a fifth one comes and asks for
ten times as much as one of them.  For the four: the 95th percentile of the time to their first token, without the
fifth one and with it, under ``fcfs`` and under ``fair``.  In virtual time, through the engine's own planner: a step
takes 5 ms + 0.02 ms for each row that decodes + 0.05 ms for each prompt token.  The figures are the same on every
machine.

    python benchmarks/bench_fair.py                         # half a minute
    python benchmarks/bench_fair.py --loads 0.5 --seconds 120 --output results.json
"""

from typing import Any

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from simulation import Request, Simulation, poisson, tokens

Row = dict[str, Any]
CALM = ("ann", "ben", "cleo", "dan")
GREEDY = "eve"
MAX_RUNNING, NUM_PAGES = 64, 4096
PER_S = 36.0  # requests of 275 and 125 tokens that the device can do


def requests(load: float, seconds: float, *, greedy: bool) -> list[Request]:
    """load: of the four, as a share of what the device can do.  The four's requests are the same with and without."""
    made: list[Request] = []
    for number, tenant in enumerate((*CALM, GREEDY)):
        if tenant == GREEDY and not greedy:
            continue
        rng = np.random.default_rng(number)
        per_s = load * PER_S / len(CALM) * (10 if tenant == GREEDY else 1)
        for at in poisson(rng, per_s, seconds):
            output = int(rng.integers(50, 200))
            made.append(Request(float(at), tokens(rng, int(rng.integers(50, 500))), output, 256, tenant))
    return sorted(made, key=lambda one: one.at)


def simulate(load: float, seconds: float) -> list[Row]:
    """A row for each policy."""
    sizes = {"max_running": MAX_RUNNING, "num_pages": NUM_PAGES}
    rows = []
    for policy in ("fcfs", "fair"):
        waits = {}
        for greedy in (False, True):
            run = Simulation(requests(load, seconds, greedy=greedy), policy, **sizes)
            outcome = run.run(until=seconds)
            waits[greedy] = run.ttft_ms(95, CALM)
            rate = outcome.num_tokens / outcome.seconds
        row = {"load": load, "policy": policy, "alone_ms": waits[False], "beside_ms": waits[True]}
        rows.append({**row, "ratio": waits[True] / waits[False], "tokens_per_s": rate})
    return rows


def show(rows: list[Row]) -> None:
    table = Table("load of the four", "policy", "TTFT p95 without the fifth", "with it", "ratio", "tokens/s")
    for row in rows:
        waits = [f"{row[key]:,.0f} ms" for key in ("alone_ms", "beside_ms")]
        table.add_row(f"{row['load']:.0%}", row["policy"], *waits, f"{row['ratio']:.2f}", f"{row['tokens_per_s']:,.0f}")
    Console().print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="of the four")
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time (default: 30)")
    arguments = parser.parse_args()
    rows = [row for load in arguments.loads for row in simulate(load, arguments.seconds)]
    show(rows)
    keep(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
