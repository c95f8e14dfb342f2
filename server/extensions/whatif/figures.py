"""The figures of a recording and its replays, side by side, and how far the replays are to be trusted.

Owns: figures, tables, warnings.  Does not know: planning, files.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.features.traffic.sizes import StepSize
from engine.features.traffic.trace import Trace
from server.extensions.bench.report import Result
from server.extensions.whatif.costs import BEYOND, Fit, StepCosts
from server.extensions.whatif.replay import Replayed

ROWS = {
    "ttft_p50_ms": "time to first token, p50, ms",
    "ttft_p99_ms": "time to first token, p99, ms",
    "tpot_p50_ms": "time per output token, p50, ms",
    "tpot_p99_ms": "time per output token, p99, ms",
    "e2e_p50_ms": "time of a request, p50, ms",
    "e2e_p99_ms": "time of a request, p99, ms",
    "hit_rate": "prompt tokens from the cache, %",
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "busy": "device busy, %",
    "retractions": "retractions",
    "refused": "requests refused",
    "requests": "requests that ended",
}
DOUBTFUL = 0.15  # relative error of the first token's p50 from which a replay explains too little


class Seen(NamedTuple):
    """A request: when it came, what it took, in seconds, and its tokens."""

    at: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    prompt: int
    cached: int
    output: int


class Column(msgspec.Struct, frozen=True):
    """One server, real or predicted.  changes: '' for none.  refused: why, and how many."""

    name: str
    changes: str
    figures: dict[str, float]
    refused: dict[str, int] = {}
    warnings: list[str] = []
    requests: list[Seen] = []


class Report(msgspec.Struct, frozen=True):
    """All of them; the first is what was measured, the second its replay."""

    model: str
    fit: Fit
    columns: list[Column]


def recorded(trace: Trace) -> Column:
    """Returns what was measured."""
    seen = [
        Seen(one.at, one.ttft_s, one.tpot_s, one.e2e_s, one.prompt, one.cached, one.output) for one in trace.requests
    ]
    figures = _figures(seen, sum(one.seconds for one in trace.steps))
    figures["retractions"] = sum(one.retractions for one in trace.requests)
    return Column("it was", "", figures, requests=seen)


def predicted(name: str, changes: str, replayed: Replayed, costs: StepCosts) -> Column:
    """Returns what a replay says."""
    seen = [
        Seen(
            one.arrived_at, one.ttft_s, one.tpot_s, one.e2e_s,
            one.num_prompt_tokens, one.cached_tokens, one.num_output_tokens,
        )
        for one in replayed.ended
    ]  # fmt: skip
    figures = _figures(seen, replayed.busy_s)
    figures |= {"retractions": replayed.num_retractions, "refused": replayed.refused.total()}
    beyond = [
        f"steps have up to {most:,} {field.replace('_', ' ')}; {known:,} is the most that was measured"
        for field, most, known in zip(StepSize._fields, replayed.largest, costs.largest, strict=True)
        if most > BEYOND * known
    ]
    return Column(name, changes, figures, dict(replayed.refused), beyond, seen)


def _figures(seen: list[Seen], busy_s: float) -> dict[str, float]:
    figures: dict[str, float] = {"requests": len(seen), "refused": 0}
    if not seen:
        return figures
    seconds = max(one.at + one.e2e_s for one in seen) - min(one.at for one in seen)
    for name in ("ttft", "tpot", "e2e"):
        times = [time * 1000 for one in seen if (time := getattr(one, f"{name}_s")) is not None]
        if times:
            p50, p99 = np.percentile(times, (50, 99))
            figures |= {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99)}
    figures["hit_rate"] = 100 * sum(one.cached for one in seen) / sum(one.prompt for one in seen)
    figures["output_tokens_per_s"] = sum(one.output for one in seen) / seconds
    figures["requests_per_s"] = len(seen) / seconds
    figures["busy"] = 100 * min(1.0, busy_s / seconds)
    return {name: round(value, 3) for name, value in figures.items()}


def show(report: Report, console: Console) -> None:
    """A table, what each column changes, and what makes it doubtful."""
    fit, columns = report.fit, report.columns
    table = Table("", *(one.name for one in columns), title=report.model)
    for name, words in ROWS.items():
        if any(name in one.figures for one in columns):
            cells = (f"{one.figures[name]:,.1f}" if name in one.figures else "" for one in columns)
            table.add_row(words, *(cell.removesuffix(".0") for cell in cells))
    console.print(table)
    for one in columns:
        if one.changes:
            console.print(f"{one.name}: {one.changes}", markup=False)
    learnt = f"step times, learnt from {fit.num_steps:,} steps: {fit.r2:.0%} of their variance explained"
    console.print(f"{learnt}, a step off by {fit.median_error:.0%} (median)", style="dim", markup=False)
    for one in columns:
        for said in (*one.warnings, *(f"{count:,} requests refused by {why}" for why, count in one.refused.items())):
            console.print(f"{one.name}: {said}", style="yellow", markup=False)
    for said in doubts(columns[0].figures, columns[1].figures):
        console.print(said, style="yellow", markup=False)


def doubts(was: Mapping[str, float], replayed: Mapping[str, float]) -> Iterable[str]:
    """Returns where the replay of what was recorded differs from what was measured."""
    for name in ("ttft_p50_ms", "ttft_p99_ms"):
        if name in was and name in replayed and abs(replayed[name] - was[name]) > DOUBTFUL * was[name]:
            observed = f"{replayed[name]:,.1f} instead of {was[name]:,.1f}"
            yield f"the replay of what was recorded has {ROWS[name]} {observed}: predictions may be as far off"


def as_result(column: Column) -> Result:
    """Returns figures as ``callboard bench`` has results, for its plots."""
    requests = [(one.at, one.ttft_s, one.e2e_s, one.prompt, one.cached, one.output, "") for one in column.requests]
    return Result("whatif", {}, {}, column.figures, {}, requests)
