"""Does the engine stay inside its container's memory, and does its own memory stay flat?

A process of its own serves random prompts that share nothing, so the KV pool fills up and all numbers of rows come by.
It runs in a control group with a limit where one can be made here (as root); elsewhere the limit is in a copy of the
files that the engine reads, and this script watches the resident memory instead of the kernel.

    python benchmarks/bench_container.py                           # 500 prompts of 2,000 tokens in 900 MB
    python benchmarks/bench_container.py --shortest 1 --longest 300 --prompts 2700 --batch 300
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import keep, new_parser

from callboard import LLM, SamplingParams
from engine.execution import device
from engine.host.memory import VERSIONS, available_bytes, own_groups
from engine.startup import loading


@dataclass(frozen=True, slots=True)
class Limit:
    """How the child is held to it.  group: the kernel's control group, None where there is none to be had.
    root: of the files that the engine reads."""

    group: Path | None
    root: Path

    def peak(self) -> int:
        """The most bytes that the group has used; 0 without one."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        paths = [self.group / name for name in names] if self.group is not None else []
        return next((int(path.read_text()) for path in paths if path.exists()), 0)


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[Limit]:
    """A group below this process's own, so that whatever limits us limits the child too; or files that say so."""
    for version in VERSIONS:
        own = next(iter(own_groups(Path("/"), version)))
        group = own / f"callboard-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / version.usage).exists():  # a directory, and no group
                continue
            (group / version.limits[0]).write_text(str(num_bytes))
            yield Limit(group, Path("/"))
            return
        finally:
            group.rmdir()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        files = {
            "proc/meminfo": Path("/proc/meminfo").read_text(),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(num_bytes),
            "sys/fs/cgroup/memory.current": "0",
            "sys/fs/cgroup/memory.stat": "",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        yield Limit(None, root)


def resident_bytes() -> int:
    """Of this process, code and all."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def look_at(root: Path) -> None:
    """Have the engine read its limit below ``root``; usage is what this process has when it is asked."""

    def available() -> int:
        (root / "sys/fs/cgroup/memory.current").write_text(str(resident_bytes()))
        return available_bytes(root)

    device.available_bytes = loading.available_bytes = available


def serve(arguments: argparse.Namespace) -> None:
    """The child: a line of JSON after every batch of prompts."""
    if arguments.root != Path("/"):
        look_at(arguments.root)
    rng = np.random.default_rng(0)
    with LLM(progress=False, config={"device": {"kind": "cpu"}}) as llm:
        print(json.dumps({"prompts": 0, "resident": resident_bytes()}), flush=True)
        for done in range(arguments.batch, arguments.prompts + 1, arguments.batch):
            lengths = rng.integers(arguments.shortest, arguments.longest + 1, arguments.batch)
            prompts = [rng.integers(3, 3000, length).tolist() for length in lengths]
            llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            print(json.dumps({"prompts": done, "resident": resident_bytes()}), flush=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the child inside the limit and read what it says."""
    num_bytes = arguments.limit_mb * 1_000_000
    with limited(num_bytes) as limit:
        command = [sys.executable, __file__, *sys.argv[1:], "--root", str(limit.root)]
        enter = partial(_enter, limit.group) if limit.group is not None else None
        readings: list[dict[str, int]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter) as child:
            assert child.stdout is not None
            for line in child.stdout:
                readings.append(json.loads(line))
                print(f"{readings[-1]['prompts']:>6} prompts {readings[-1]['resident'] / 1e6:7.1f} MB", flush=True)
        return {
            "limit_bytes": num_bytes,
            "held_by": "this script" if limit.group is None else "the kernel",
            "peak_bytes": limit.peak(),
            "exit_code": child.returncode,
            "readings": readings,
        }


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--limit-mb", type=int, default=900)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--shortest", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=2000)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.root is not None:
        serve(arguments)
        return
    result = run(arguments)
    readings = result["readings"]
    most = max([result["peak_bytes"], *(reading["resident"] for reading in readings)])
    print(f"at most {most / 1e6:.0f} MB of {arguments.limit_mb} MB, held by {result['held_by']}")
    keep(arguments.output, result)
    if result["exit_code"] or not readings or readings[-1]["prompts"] < arguments.prompts:
        sys.exit(f"the engine ended with code {result['exit_code']}")
    if most > result["limit_bytes"]:
        sys.exit("the engine passed its limit")


if __name__ == "__main__":
    main()
