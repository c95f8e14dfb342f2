"""Compare every GPU path with its reference and time it: one command, one compact table, one JSON file.

    python benchmarks/gpu_check.py --output benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --device cpu --sections sampler greedy     # the same code without a GPU

Each section is a function of gpu_sections/ and runs in a process of its own, bounded in time.  One that fails, hangs or
leaves the GPU in an unusable state is a row that says so, the rows it had by then are kept, and the others still run.
--together 8 runs those side by side that only check; on a GPU each takes some memory, so leave it at 1 on a small one.
--piece 1, 2, ... runs so many of them as end within ten minutes, for machines that take no longer commands.
The first one, warm_up, is for compilers, which fill their caches there; what they lack then sections compile.
To spare that, carry ~/.triton, FlashInfer's prebuilt modules and ~/.cache/callboard from a machine of the same kind.

On a CPU every section runs in a small size, and says what it had to skip.  Beside torch it takes what needs.py lists;
what of it is missing is said before anything runs, together with how to carry it to a machine without a network.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_sections.needs import complaint, remark
from gpu_sections.table import SECTIONS, pieces

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
SAYS_WHERE_S = 5.0  # before its limit a section's process writes to stderr where its threads are
COLUMNS = {
    "error": "error",
    "us": "us",
    "tokens/s": "tokens_per_s",
    "GB/s": "gb_per_s",
    "of copy": "of_copy",
    "TFLOP/s": "tflops",
    "of plain": "of_plain",
    "of floor": "of_floor",
    "launch us": "launch_us",
    "gap us": "gap_us",
    "MB": "mb",
}


def run_section(name: str, device: "torch.device", rows_file: Path) -> None:
    """Write the section's rows as they come, a line of JSON each; the last one says how it failed, if it did."""
    import torch

    with rows_file.open("w") as out:
        try:
            with torch.inference_mode():
                for row in SECTIONS[name].rows(device, small=device.type == "cpu"):
                    print(json.dumps(row), file=out, flush=True)
        except Exception as error:  # whatever it is, the row is what people look at
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            row = {"case": "(section)", "ok": False, "problem": problem, "trace": traceback.format_exc()}
            print(json.dumps(row), file=out, flush=True)


def guarded(name: str, device: "torch.device", timeout_s: float) -> list[Row]:
    """The section's rows, from a process of its own, and one more if that died or was not done in time."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        command = [sys.executable, __file__, "--device", device.type, "--sections", name, "--rows-file", str(path)]
        command += ["--timeout", str(timeout_s)]
        problem = ""
        try:
            # Its stderr is shown: kernels that are compiled and assertions on the device write there.
            code = subprocess.run(command, timeout=timeout_s, check=False).returncode
            problem = f"its process ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done in {timeout_s:g} s"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if problem or not rows:
        rows.append({"case": "(section)", "ok": False, "problem": problem or "it gave no rows"})
    return rows


def at_once(
    names: Sequence[str], device: "torch.device", timeout_s: float | None, together: int
) -> Iterator[tuple[str, list[Row]]]:
    """Each section with its rows, as it ends.  First those that time nothing, ``together`` at once; then one by one."""

    def run(name: str) -> tuple[str, list[Row]]:
        start = time.perf_counter()
        rows = guarded(name, device, timeout_s or SECTIONS[name].limit_s)
        failed = sum(not row["ok"] for row in rows)
        said = f"{failed} of {len(rows)} rows failed" if failed else f"{len(rows)} rows ok"
        print(f"gpu_check: {name}: {said}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        return name, rows

    beside = [name for name in names if together > 1 and not SECTIONS[name].timed]
    with ThreadPoolExecutor(together) as pool:
        for done in as_completed([pool.submit(run, name) for name in beside]):
            yield done.result()
    yield from (run(name) for name in names if name not in beside)


def show(results: dict[str, list[Row]]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    present = {key for rows in results.values() for row in rows for key in row}
    columns = {title: key for title, key in COLUMNS.items() if key in present}
    table = Table("section", "case", "", *columns, "problem")
    for name, rows in results.items():
        for row in rows:
            mark = "[green]ok[/green]" if row["ok"] else "[red]FAIL[/red]"
            cells = [f"{row[key]:.3g}" if key in row else "" for key in columns.values()]
            table.add_row(name, row["case"], mark, *cells, row.get("problem", ""))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the script itself")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), help="default: all")
    parser.add_argument("--together", type=int, default=1, help="so many at once of the sections that time nothing")
    parser.add_argument("--piece", type=int, help="only this share of the sections, counted from 1")
    parser.add_argument(
        "--timeout", type=float, help="seconds that one section may take (default: its own, mostly 120)"
    )
    parser.add_argument("--output", type=Path, help="write machine and rows as JSON to this file")
    parser.add_argument("--rows-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # Before torch reads it: threads that wait would take the cores of other processes, and references on the CPU ten
    # times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if problem := complaint():
        parser.exit(2, f"gpu_check: {problem}\n")
    # Only now: it might have been missing.
    import torch
    from machine import keep

    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "gpu_check: torch sees no GPU; --device cpu tries the script without one\n")
    names = arguments.sections or list(SECTIONS)
    if arguments.piece is not None:
        shares = pieces(names)
        if not 1 <= arguments.piece <= len(shares):
            parser.exit(2, f"gpu_check: --piece {arguments.piece}: there are 1 to {len(shares)}\n")
        names = shares[arguments.piece - 1]
    if arguments.rows_file:
        limit_s = arguments.timeout or SECTIONS[names[0]].limit_s
        faulthandler.dump_traceback_later(max(1.0, limit_s - SAYS_WHERE_S))
        run_section(names[0], device, arguments.rows_file)
        return
    if said := remark():
        print(f"gpu_check: {said}", file=sys.stderr)
    results: dict[str, list[Row]] = {}
    for name, rows in at_once(names, device, arguments.timeout, arguments.together):
        results[name] = rows
        # After every section: what is known is kept if the whole run is cut off.
        keep(arguments.output, {"torch": torch.__version__, "sections": results})
    show(results)
    parser.exit(0 if all(row["ok"] for rows in results.values() for row in rows) else 1)


if __name__ == "__main__":
    main()
