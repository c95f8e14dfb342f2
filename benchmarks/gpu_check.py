"""Compare every GPU path with its reference and time it: one command, one compact table, one JSON file.

    python benchmarks/gpu_check.py --output benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --device cpu --sections sampler greedy     # the same code without a GPU

Each section is a file of gpu_sections/ and runs in a process of its own, bounded in time.  One that fails, hangs or
leaves the GPU in an unusable state is a row that says so, the rows it had by then are kept, and the others still run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch
from gpu_sections.rows import Row
from machine import describe_machine
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 120.0
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
# Section -> the function (device) -> rows.  Looked up only in the section's own process.
SECTIONS = {
    "attention_torch": "gpu_sections.attention_torch:attention",
    "attention_triton": "gpu_sections.attention_triton:section",
    "attention_triton_speed": "gpu_sections.attention_triton_speed:decodes",
    "attention_triton_prompts": "gpu_sections.attention_triton_speed:prompts",
    "attention_triton_tuning": "gpu_sections.attention_triton_speed:tuning",
    "flashinfer": "gpu_sections.attention_libraries:flashinfer",
    "flash_attn": "gpu_sections.attention_libraries:flash_attn",
    "kernels": "gpu_sections.kernels:section",
    "sampler": "gpu_sections.sampler:sampler",
    "kernel_sampler": "gpu_sections.kernel_sampler:section",
    "host_pool": "gpu_sections.host_pool:host_pool",
    "nccl": "gpu_sections.nccl:section",
    "greedy": "gpu_sections.greedy:greedy",
    "graph_tokens": "gpu_sections.graphs:tokens",
    "graph_decodes": "gpu_sections.graphs:decode_steps",
    "graph_decodes_14b": "gpu_sections.graphs:decode_steps_14b",
    "graph_prefills": "gpu_sections.graphs:prefill_steps",
    "graph_logprobs": "gpu_sections.graph_checks:logprobs",
    "graph_start_up": "gpu_sections.graph_checks:start_up",
    "graph_captures": "gpu_sections.captures:section",
    "throughput": "gpu_sections.throughput:throughput",
}
# What cannot be tried without a GPU at all.
NEEDS_GPU = ("graph_captures", "graph_decodes_14b", "nccl", "flashinfer", "flash_attn")


def run_section(name: str, device: torch.device, rows_file: Path) -> None:
    """Write the section's rows as they come, a line of JSON each; the last one says how it failed, if it did."""
    module, _, function = SECTIONS[name].partition(":")
    with rows_file.open("w") as out:
        try:
            with torch.inference_mode():
                for row in getattr(import_module(module), function)(device):
                    print(json.dumps(row), file=out, flush=True)
        except Exception as error:  # whatever it is, the row is what people look at
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            row = {"case": "(section)", "ok": False, "problem": problem, "trace": traceback.format_exc()}
            print(json.dumps(row), file=out, flush=True)


def guarded(name: str, device: torch.device, timeout_s: float) -> list[Row]:
    """The section's rows, from a process of its own, and one more if that died or was not done in time."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        command = [sys.executable, __file__, "--device", device.type, "--sections", name, "--rows-file", str(path)]
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


def show(results: dict[str, list[Row]]) -> None:
    """The table."""
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
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), help="default: all that the device can run")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds that one section may take")
    parser.add_argument("--output", type=Path, help="write machine and rows as JSON to this file")
    parser.add_argument("--rows-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "gpu_check: torch sees no GPU; --device cpu tries the script without one\n")
    names = arguments.sections or [one for one in SECTIONS if device.type == "cuda" or one not in NEEDS_GPU]
    if arguments.rows_file:
        run_section(names[0], device, arguments.rows_file)
        return
    results: dict[str, list[Row]] = {}
    for name in names:
        start = time.perf_counter()
        results[name] = guarded(name, device, arguments.timeout)
        failed = sum(not row["ok"] for row in results[name])
        said = f"{failed} of {len(results[name])} rows failed" if failed else f"{len(results[name])} rows ok"
        print(f"gpu_check: {name}: {said}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        if arguments.output:  # after every section: what is known is kept if the whole run is cut off
            report = {"machine": describe_machine(), "torch": torch.__version__, "sections": results}
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(results)
    parser.exit(0 if all(row["ok"] for rows in results.values() for row in rows) else 1)


if __name__ == "__main__":
    main()
