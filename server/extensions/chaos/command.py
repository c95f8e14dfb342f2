"""``callboard chaos``: the service under faults in virtual time.

Owns: the order of the work, what is printed.  Does not know: how a run goes, what must hold in it.
"""

import os
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.config import Config
from engine.types.errors import ConfigError


def chaos(parsed: Namespace, config: Config) -> None:
    """Do what the arguments say; the exit code is 1 if a promise was broken."""
    from server.extensions.chaos import campaign

    console = Console(stderr=bool(parsed.json))
    if parsed.lines is not None:
        campaign.work(parsed.seed, parsed.lines, parsed.runs, parsed.minutes, parsed.kind)
    elif parsed.mutants:
        _list_bugs(parsed.json)
    elif parsed.mutant is not None:
        sys.exit(_hunt(parsed, console))
    elif parsed.recording is not None:
        sys.exit(_recorded(parsed, console))
    elif parsed.only is not None:
        sys.exit(_one(parsed, console))
    else:
        sys.exit(_many(parsed, console))


# ---- many runs ----------------------------------------------------------------------------------


def _many(parsed: Namespace, console: Console) -> int:
    from server.extensions.chaos.campaign import campaign
    from server.extensions.chaos.worlds import RunReport

    jobs = parsed.jobs or os.cpu_count() or 1
    total = float(parsed.runs or parsed.minutes * 60)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hours, began = 0.0, time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("under faults", total=total)

        def on_run(run: RunReport) -> None:
            nonlocal hours
            hours += run.virtual_s / 3600
            done = progress.tasks[0].completed + 1 if parsed.runs else min(total, time.monotonic() - began)
            progress.update(task, completed=done, description=f"{hours:.2f} simulated hours")

        result = campaign(parsed.seed, parsed.runs, parsed.minutes, jobs, on_run, parsed.kind)
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
        return int(bool(result.failures))
    console.print(_counts("faults", result.faults))
    console.print(
        f"{result.num_runs} runs ({', '.join(f'{count} {kind}' for kind, count in sorted(result.by_kind.items()))}), "
        f"{result.virtual_s / 3600:.2f} simulated hours in {result.seconds:.0f} s on {jobs} processes",
        soft_wrap=True,
    )
    console.print(
        f"{result.num_asked} requests taken: {result.num_ended} ended once, the clients of the others left; "
        f"{result.num_tokens} tokens equal; pages whole in {result.num_pages_counted} counts",
        soft_wrap=True,
    )
    if not result.failures:
        console.print("the checker has read every log: every promise was kept", style="green")
        return 0
    failed = min(result.failures, key=lambda run: run.seed)
    _show_failure(console, failed, f" --kind {parsed.kind}" if parsed.kind else "")
    return 1


def _counts(title: str, counts: "Counter[str]") -> Table:
    table = Table("kind", "times", title=title)
    for kind, count in sorted(counts.items()):
        table.add_row(kind, str(count))
    return table


# ---- one run ------------------------------------------------------------------------------------


def _one(parsed: Namespace, console: Console) -> int:
    from server.extensions.chaos.ledger import Ledger
    from server.extensions.chaos.worlds import kind_of

    kind, seed = kind_of(parsed.only, parsed.kind)
    kept = [int(one) for one in parsed.operations.split(",")] if parsed.operations else None
    ledger = Ledger()
    run = kind.play(seed, kept, parsed.order, ledger)
    if parsed.log is not None:
        Path(parsed.log).write_text("\n".join(ledger.lines) + "\n")
    if parsed.plot is not None:
        from server.extensions.chaos.picture import draw_run

        draw_run(ledger.lines, f"run {parsed.only}, {kind.name}", parsed.plot)
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(run), indent=1).decode())
    else:
        console.print(f"run {parsed.only}: {kind.about}")
        for number, words in kind.operations(seed).items():
            if kept is None or number in kept:
                console.print(f"  {number}: {words}", markup=False, highlight=False, soft_wrap=True)
        console.print(_counts("what happened", Counter(run.faults) + Counter(run.scarce)))
        console.print(
            f"{run.num_asked} requests taken, {run.num_ended} ended, {run.num_tokens} tokens, "
            f"{run.num_pages_counted} counts of pages, {run.virtual_s:.2f} virtual s"
        )
        console.print(
            f"FAILED, found by {run.found_by}: {run.failure}: {run.why}" if run.found_by else "every promise was kept",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    return int(bool(run.found_by))


def _show_failure(console: Console, failed: "object", kind: str) -> None:
    from server.extensions.chaos.campaign import shrunk
    from server.extensions.chaos.worlds import RunReport

    assert isinstance(failed, RunReport)
    console.print(
        f"run {failed.seed} ({failed.kind}) FAILED, found by {failed.found_by}: {failed.failure}: {failed.why}",
        style="red", soft_wrap=True, markup=False,
    )  # fmt: skip
    small = shrunk(failed)
    console.print(f"it still fails so with {len(small.kept)} of its {small.num_before} operations:")
    for number, words in zip(small.kept, small.in_words, strict=True):
        console.print(f"  {number}: {words}", markup=False, highlight=False, soft_wrap=True)
    if small.run.why:
        console.print(f"  then {small.run.why}", markup=False, highlight=False, soft_wrap=True)
    order = f" --order {small.order}" if small.order else ""
    operations = f" --operations {','.join(map(str, small.kept))}"
    console.print(f"replay: callboard chaos{kind} --only {failed.seed}{operations}{order}", soft_wrap=True)


# ---- planted bugs -------------------------------------------------------------------------------


def _list_bugs(as_json: bool) -> None:
    from server.extensions.chaos.bugs import all_bugs

    bugs = all_bugs().values()
    if as_json:
        rows = [{"name": bug.name, "kind": bug.kind, "place": bug.place, "issue": bug.issue} for bug in bugs]
        print(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode())
        return
    table = Table("bug", "found in runs of", "in the place of", "another engine's", title=f"{len(bugs)} bugs to plant")
    for bug in bugs:
        table.add_row(bug.name, bug.kind, bug.place, bug.issue)
    Console(width=170).print(table)


def _hunt(parsed: Namespace, console: Console) -> int:
    from server.extensions.chaos.bugs import all_bugs

    bugs = all_bugs()
    if parsed.mutant != "all" and parsed.mutant not in bugs:
        raise ConfigError(f"--mutant {parsed.mutant}: there is no such bug; callboard chaos --mutants lists them")
    chosen = [bug for bug in bugs.values() if parsed.mutant in (bug.name, "all") and parsed.kind in (bug.kind, "")]
    rows = []
    for bug in chosen:
        rows.append(_hunted(bug, console, limit_s=20.0 if len(chosen) == 1 else 8.0, is_alone=len(chosen) == 1))
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode())
    survived = [row["name"] for row in rows if not row["seed"]]
    if len(chosen) > 1:
        console.print(f"{len(rows) - len(survived)} of {len(rows)} planted bugs were found; not: {survived or 'none'}")
    return int(bool(survived))


def _hunted(bug: "object", console: Console, limit_s: float, *, is_alone: bool) -> dict[str, str]:
    """Return the row of a bug: where it was found, by what, and how few operations show it."""
    from server.extensions.chaos.bugs import Bug
    from server.extensions.chaos.campaign import hunt, shrunk
    from server.extensions.chaos.worlds import KINDS

    assert isinstance(bug, Bug)
    like = f", as {bug.issue} was" if bug.issue else ""
    console.print(f"planted: {bug.name} in {bug.place}{like}", soft_wrap=True, highlight=False)
    failed = hunt(bug)
    row = {"name": bug.name, "kind": bug.kind, "issue": bug.issue, "seed": "", "found_by": "", "operations": ""}
    if failed is None:
        console.print("  it was not found", style="red")
        return row
    with bug.mutant.planted():
        small = shrunk(failed, limit_s)
    without = KINDS[bug.kind].play(failed.seed)
    row |= {"seed": str(failed.seed), "found_by": failed.found_by, "why": small.run.why or failed.why}
    row["operations"] = f"{len(small.kept)} of {small.num_before}"
    found_by = {"rules": "a rule of the simulation", "checker": "the checker alone"}.get(
        failed.found_by, "a rule of the simulation, and the checker"
    )
    console.print(f"  found in run {failed.seed} of {bug.kind} by {found_by}; {row['operations']} operations show it")
    if is_alone:
        for number, words in zip(small.kept, small.in_words, strict=True):
            console.print(f"    {number}: {words}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"    then {row['why']}", markup=False, highlight=False, soft_wrap=True)
    if without.found_by:
        console.print("  the same run fails without it too", style="red")
        row["seed"] = ""
    elif is_alone:
        console.print("  the same run without the bug: every promise was kept", style="green")
    return row


def _recorded(parsed: Namespace, console: Console) -> int:
    from server.extensions.chaos.recorded import disturbed

    num_runs = parsed.runs or 20
    failures = 0
    for seed in range(parsed.seed, parsed.seed + num_runs):
        fault, done = disturbed(parsed.recording, seed)
        failures += bool(fault)
        console.print(f"seed {seed}: {done}: {fault or 'every invariant held'}", soft_wrap=True, markup=False)
    return int(failures > 0)
