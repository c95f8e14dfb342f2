"""The whole suite as other machines would run it: another processor, no compiler, no home.

    python -m tests.machines                      every row, one after the other
    python -m tests.machines haswell aten-avx2    these rows
    python -m tests.machines haswell+no-compiler  both at once

A row sets variables that the libraries below read: which of its kernels OpenBLAS, torch and oneDNN choose, how many
threads torch has, whether there is a C compiler, whether the home folder can be written.  The libraries' variables that
a row does not set are unset in it, whatever this machine sets, and torch has one thread then.  A processor without
AVX-512 cannot run the rows for it; they are left out there.  A test that hangs ends its process after LONGEST_S, and is
among what failed.

Owns: the rows, the table, the file of ``--output``.  Does not know: what is tested.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from server.extensions.bench.machine import describe_machine

ROOT = Path(__file__).parents[1]
LONGEST_S = 600  # for one test, whose process is ended then
AVX512 = ("skylakex", "aten-avx512", "onednn-avx512")
CHOICES = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
COMPILERS = re.compile(r"(.+-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c89|c99|cpp)(-[\d.]+)?")
ROWS: dict[str, dict[str, str]] = {
    "as it is": {},
    "haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "zen": {"OPENBLAS_CORETYPE": "Zen"},
    "skylakex": {"OPENBLAS_CORETYPE": "SkylakeX"},
    "aten-default": {"ATEN_CPU_CAPABILITY": "default"},
    "aten-avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "aten-avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "onednn-all": {"ONEDNN_MAX_CPU_ISA": "ALL"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
    "no-compiler": {"CC": "no-compiler-here"},
    "no-home": {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/home/cache"},
}


def has_avx512() -> bool:
    """Whether this processor runs AVX-512's instructions."""
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512f" in cpu.read_text()


def without_compilers(folder: Path) -> str:
    """A PATH of one folder, with a link to each program of this machine that compiles no C or C++."""
    for place in map(Path, os.get_exec_path()):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def run(row: str, options: list[str]) -> dict[str, object]:
    """The suite's counts in a row of the table, and whether all is right; "+" joins rows."""
    variables = {name: value for part in row.split("+") for name, value in ROWS[part].items()}
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | variables
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as programs:
        if "CC" in variables:
            environment["PATH"] = without_compilers(Path(programs))
        limit = ["-o", f"faulthandler_timeout={LONGEST_S}", "-o", "faulthandler_exit_on_timeout=true"]
        command = [sys.executable, "-m", "pytest", *limit, *options]
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
        minutes = round((time.monotonic() - began) / 60, 1)
        output.seek(0)
        text = output.read()
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text[-2000:])
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    ok = code == pytest.ExitCode.OK
    found = {"row": row, "variables": variables, **counts, "minutes": minutes, "which": failed, "ok": ok}
    return found if counts else found | {"output": text[-2000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of {', '.join(ROWS)}, or several joined by +")
    parser.add_argument("--options", default="-n 2 --dist worksteal", help="what pytest is called with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the table there, as JSON")
    chosen = parser.parse_args()
    table = Table("row", "passed", "failed", "skipped", "minutes", "which failed")
    results = []
    for row in chosen.rows or ROWS:
        if not has_avx512() and any(part in AVX512 for part in row.split("+")):
            results.append({"row": row, "left out": "this processor has no AVX-512"})
            table.add_row(row, "", "", "", "", str(results[-1]["left out"]))
            continue
        results.append(result := run(row, shlex.split(chosen.options)))
        counts = (str(result.get(word, 0)) for word in ("passed", "failed", "skipped", "minutes"))
        table.add_row(row, *counts, "\n".join(result["which"]) or str(result.get("output", "")))  # type: ignore[arg-type]
        if chosen.output:
            chosen.output.write_text(json.dumps({"machine": describe_machine(), "rows": results}, indent=1) + "\n")
    Console(width=160).print(table)
    sys.exit(not all(result.get("ok", True) for result in results))


if __name__ == "__main__":
    main()
