"""The result of a run: figures, goodput under an objective, tables, plots, and how two runs compare.

Owns: the result file.  Does not know: how it was measured.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.types.errors import ConfigError
from server.extensions.bench.client import Record

Figures = dict[str, float]
PERCENTS = (50, 90, 95, 99)
LATENCIES: dict[str, tuple[str, Callable[[Record], list[float]]]] = {
    "ttft": ("time to first token", lambda one: [] if one.ttft_s is None else [one.ttft_s]),
    "tpot": ("time per output token", lambda one: [] if one.tpot_s is None else [one.tpot_s]),
    "itl": ("time between events", lambda one: one.gaps_s),
    "e2e": ("time of a request", lambda one: [one.e2e_s]),
}
RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s, prompts included",
    "goodput_per_s": "requests/s within the objective",
}
SLO_NAMES = ("ttft", "tpot", "e2e")


class Result(msgspec.Struct):
    """A result file.  kind: serve or offline.  load: what was asked for.  figures: rates, and ``<latency>_<which>_ms``.

    errors: how often each.  requests: due_s, ttft_s, e2e_s, prompt, cached and output tokens, error; of each."""

    kind: str
    machine: dict[str, Any]
    load: dict[str, Any]
    figures: Figures
    errors: dict[str, int] = {}
    requests: list[tuple[float, float | None, float, int, int, int, str]] = []
    format: int = 1


def parse_slo(text: str) -> Figures:
    """'ttft=0.5,tpot=0.05' as seconds by name.  Raises ConfigError."""
    slo: Figures = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            slo[name] = float(value)
        except ValueError:
            slo[name] = 0.0
        if name not in SLO_NAMES or not 0 < slo[name] < float("inf"):
            names = ", ".join(SLO_NAMES)
            raise ConfigError(f"--slo {text}: {part!r} is not NAME=SECONDS; names are {names}, e.g. ttft=0.5,tpot=0.05")
    return slo


def meets(record: Record, slo: Figures) -> bool:
    """Whether a request is within every bound; one token alone has no time per token, and so meets that."""
    seen = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return not record.error and all((seen[name] or 0.0) <= most for name, most in slo.items())


def summarise(records: list[Record], seconds: float, slo: Figures) -> tuple[Figures, dict[str, int]]:
    """Figures of those that ended as they should, and how often each error came."""
    good = [one for one in records if not one.error]
    num_output = sum(one.output_tokens for one in good)
    num_prompt = sum(one.prompt_tokens for one in good)
    figures: Figures = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "cached_tokens": sum(one.cached_tokens for one in good),
        "output_tokens": num_output,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_output + num_prompt) / seconds,
        "late_ms": max((one.late_s for one in records), default=0.0) * 1000,
    }
    for name, (_, of) in LATENCIES.items():
        if times := [seen * 1000 for one in good for seen in of(one)]:
            figures[f"{name}_mean_ms"] = float(np.mean(times))
            for percent, value in zip(PERCENTS, np.percentile(times, PERCENTS), strict=True):
                figures[f"{name}_p{percent}_ms"] = float(value)
    if slo:
        num_met = sum(meets(one, slo) for one in records)
        figures |= {"goodput_per_s": num_met / seconds, "goodput_share": num_met / max(1, len(records))}
    errors = Counter(one.error for one in records if one.error)
    return {name: round(value, 4) for name, value in figures.items()}, dict(errors)


def requests_of(records: list[Record]) -> list[tuple[float, float | None, float, int, int, int, str]]:
    """Returns the figures as a result file has them."""
    return [
        (round(one.due_s, 4), one.ttft_s and round(one.ttft_s, 5), round(one.e2e_s, 5),
         one.prompt_tokens, one.cached_tokens, one.output_tokens, one.error)
        for one in records
    ]  # fmt: skip


def show(result: Result, console: Console) -> None:
    """The figures as tables."""
    figures = result.figures
    table = Table(show_header=False, title=f"{result.load.get('model', '')}: {_sentence(figures)}")
    for name, words in RATES.items():
        if name in figures:
            share = f" ({figures['goodput_share']:.0%})" if name == "goodput_per_s" else ""
            table.add_row(words, f"{figures[name]:,.2f}{share}")
    console.print(table)
    if "e2e_mean_ms" in figures:
        table = Table("milliseconds", "mean", *(f"p{percent}" for percent in PERCENTS))
        for name, (words, _) in LATENCIES.items():
            if f"{name}_mean_ms" in figures:
                keys = ("mean", *(f"p{percent}" for percent in PERCENTS))
                table.add_row(words, *(f"{figures[f'{name}_{key}_ms']:,.1f}" for key in keys))
        console.print(table)
    for error, count in sorted(result.errors.items(), key=lambda item: -item[1]):
        console.print(f"{count} failed: {error}", style="red", markup=False)
    if figures.get("late_ms", 0.0) > 100.0:
        late = f"requests were sent up to {figures['late_ms']:.0f} ms late: this client is too slow for the load"
        console.print(late, style="yellow")


def _sentence(figures: Figures) -> str:
    counts = f"{figures['requests']:,.0f} requests in {figures['seconds']:,.1f} s"
    tokens = f"{figures['prompt_tokens']:,.0f} tokens in, {figures['output_tokens']:,.0f} out"
    cached = f" ({figures['cached_tokens']:,.0f} cached)" if figures.get("cached_tokens") else ""
    return f"{counts}, {tokens}{cached}"


def write(result: Result, path: Path) -> None:
    """A line for each figure, and for each request.  Raises ConfigError."""
    head = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(result, requests=[])), indent=1)
    rows = b",\n".join(b"  " + msgspec.json.encode(row) for row in result.requests)
    try:
        path.write_bytes(head.replace(b'"requests": []', b'"requests": [\n' + rows + b"\n ]") + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read(path: Path) -> Result:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of 'callboard bench': {error}") from None


def compare(first: Result, second: Result, console: Console) -> None:
    """Figure by figure, and what else differs.  Raises ConfigError for results of two kinds."""
    if first.kind != second.kind:
        raise ConfigError(f"the results are of two kinds, {first.kind} and {second.kind}; compare two of one kind")
    for what, one, other in (("load", first.load, second.load), ("machine", first.machine, second.machine)):
        for key in sorted({*one, *other} - {"command"}):
            if one.get(key) != other.get(key):
                differs = f"{what} differs: {key} is {one.get(key)} and {other.get(key)}"
                console.print(differs, style="yellow", markup=False)
    table = Table("", "first", "second", "second / first", "")
    for name in first.figures:
        if name not in second.figures:
            continue
        before, after = first.figures[name], second.figures[name]
        ratio = f"{after / before:.2f}" if before else ""
        table.add_row(name.replace("_", " "), f"{before:,.2f}", f"{after:,.2f}", ratio, _verdict(name, before, after))
    console.print(table)


def _verdict(name: str, before: float, after: float) -> str:
    """Returns '' for what is neither good nor bad, or differs by less than runs of one server do."""
    more_is_better = name in RATES or name == "goodput_share"
    if not more_is_better and name != "failed" and not name.startswith(tuple(LATENCIES)):
        return ""
    if abs(after - before) <= 0.02 * abs(before):
        return ""
    return "[green]better[/green]" if (after > before) == more_is_better else "[red]worse[/red]"


def plot(results: dict[str, Result], path: Path) -> None:
    """The share of requests within a time, for the first token and for the whole, a line per result.  Writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for place, (axis, words) in enumerate(zip(axes, ("time to first token", "time of a request"), strict=True)):
        for name, result in results.items():
            seen = ((one[1], one[2]) for one in result.requests if not one[6])
            times = sorted(time for pair in seen if (time := pair[place]) is not None)
            axis.step(times, np.arange(1, len(times) + 1) / max(1, len(times)), where="post", label=name)
        axis.set(xlabel=f"{words}, s", ylim=(0, 1))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    if len(results) > 1:
        axes[1].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
