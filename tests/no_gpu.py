"""Compiling Triton's kernels for an H200 (sm_90a) on a machine without a GPU.

Owns: the driver that stands in, what the assembler says of a kernel, where it waits for the one in front of it.
Does not know: kernels, who launches them.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


class NoGPU:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def order(kernel: Any) -> dict[str, Any]:
    """How a kernel keeps the order of its stream, see ``engine/kernels/dependent_launch.py``.

    early: whether it is launched before its predecessor is complete.  waits, lets_next: how often it says so.
    read_before, written_before: accesses to memory in front of the first wait."""
    all_of_it = instructions(kernel.asm["ptx"])
    wait, lets_next = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    num_before = all_of_it.index(wait) if wait in all_of_it else len(all_of_it)
    before, behind = all_of_it[:num_before], all_of_it[num_before:]
    return {
        "early": bool(kernel.metadata.launch_pdl),
        "waits": all_of_it.count(wait),
        "lets_next": behind.count(lets_next),
        "lets_next_before": before.count(lets_next),
        "read_before": sum(_accesses(one, "ld") or one.startswith("cp.async") for one in before),
        "written_before": sum(_accesses(one, "st", "atom", "red") for one in before),
    }


INSTRUCTION = re.compile(r"^\s*\{?\s*(?:@!?%\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)", re.MULTILINE)
OWN_MEMORY = ("shared", "local", "param", "const")


def instructions(ptx: str) -> list[str]:
    """The names of all instructions, with their qualifiers.  A line has one at most.

    Comments, directives, labels and names of variables may contain the same text."""
    return INSTRUCTION.findall(ptx)


def _accesses(name: str, *kinds: str) -> bool:
    """Whether an instruction is of one of the kinds, and on memory that other kernels see."""
    kind, *qualifiers = name.split(".")
    return kind in kinds and not any(one.split("::")[0] in OWN_MEMORY for one in qualifiers)


def resources(kernel: Any) -> dict[str, int]:
    """Warps and bytes of shared memory; where triton brings an assembler, registers and bytes of stack and of spills.

    Spilled registers lie on the stack, and so do arrays with variable indices."""
    found = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if tool.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for key, number in (
            ("regs", r"Used (\d+) registers"),
            ("stack", r"(\d+) bytes stack frame"),
            ("spilled", r"(\d+) bytes spill (?:stores|loads)"),
        ):
            found[key] = max(map(int, re.findall(number, said)))
    return found
