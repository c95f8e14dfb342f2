"""A run as a picture: requests as bars over time, faults as lines, pages of a pool below.

Owns: the drawing.  Does not know: what is right.
"""

import json
from pathlib import Path
from typing import Any

COLOURS = {"stop": "tab:green", "length": "tab:green", "left": "tab:grey"}
FAULT_COLOUR = "tab:red"


def draw_run(lines: list[str], title: str, path: Path) -> None:
    """Draw the log of a run to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    events = [json.loads(line) for line in lines]
    pools = sorted({one.get("pool", "") for one in events if one["event"] == "pages"})
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, gridspec_kw={"height_ratios": [3, 1.4]}, layout="constrained"
    )
    _draw_requests(above, events)
    faults = [one for one in events if one["event"] == "fault" and one["kind"] != "Deadline"]
    for number, fault in enumerate(faults):
        for axes in (above, below):
            axes.axvline(fault["t"], color=FAULT_COLOUR, linewidth=0.8, linestyle=":")
        above.text(
            fault["t"], 1.01 + 0.045 * (number % 3), fault["kind"], transform=above.get_xaxis_transform(),
            color=FAULT_COLOUR, fontsize=7, ha="center",
        )  # fmt: skip
    for pool in pools:
        counted = [one for one in events if one["event"] == "pages" and one.get("pool", "") == pool]
        times = [one["t"] for one in counted]
        held = [100 * (one["total"] - one["counts"][0] - one["counts"][1]) / one["total"] for one in counted]
        below.step(times, held, where="post", label=pool or "the engine", linewidth=1)
    below.set_ylabel("pages in use, %")
    below.set_xlabel("virtual seconds")
    if pools:
        below.legend(fontsize=7, loc="upper right")
    above.set_title(title, pad=34, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_requests(axes: Any, events: list[dict[str, Any]]) -> None:
    """Draw a bar for each request, with a dot for every delivery of tokens."""
    rows: dict[int, int] = {}
    for one in events:
        if one["event"] == "asked":
            rows[one["request"]] = len(rows)
    for number, row in rows.items():
        own = [
            one for one in events if one.get("request") == number and one["event"] in ("asked", "tokens", "end", "left")
        ]
        ends = [one for one in own if one["event"] in ("end", "left")]
        last = ends[0] if ends else own[-1]
        why = last.get("why", "left")
        colour = COLOURS.get(why, "tab:orange")
        axes.plot([own[0]["t"], last["t"]], [row, row], color=colour, linewidth=2.2, solid_capstyle="butt")
        times = [one["t"] for one in own if one["event"] == "tokens"]
        axes.plot(times, [row] * len(times), ".", color="black", markersize=2)
        if why not in COLOURS:
            axes.text(last["t"], row, f" {why}", fontsize=6, va="center")
    axes.set_ylabel("requests")
    axes.invert_yaxis()
