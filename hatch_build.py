"""The part of the build that compiles the kernels in C into a wheel, for each kind of CPU of one machine.

``make wheel`` enables it; other builds, an editable one too, have the sources alone, which are compiled at the first
start where there is a compiler.
"""

import os
import platform
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The oldest C library that pip has a name for, unless symbols of a later one are called.
OLDEST_GLIBC = 17
SYMBOL = re.compile(rb"GLIBC_2\.(\d+)")


class KernelsHook(BuildHookInterface):
    """Adds a library of each level to the wheel.  CC: the compiler.  CALLBOARD_MACHINE: what it compiles for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the wheel by the C library that it needs."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from engine.kernels.levels import LEVELS
        from engine.kernels.sources import OPENMP, every_unit, made

        machine = os.environ.get("CALLBOARD_MACHINE") or platform.machine()
        compiler = shlex.split(os.environ.get("CC") or "cc")
        levels = [level for level in LEVELS if level.machine == machine]
        if sys.platform != "linux":
            raise ValueError(f"a wheel with kernels is made on Linux, not on {sys.platform}; build one without")
        if not levels:
            raise ValueError(f"there are no kernels for {machine}: CALLBOARD_MACHINE is one of x86_64, aarch64")
        self._made, glibc = tempfile.TemporaryDirectory(), OLDEST_GLIBC
        for level in levels:
            library = made(compiler, (*level.flags, *OPENMP), every_unit(), limit_s=None)
            glibc = max([glibc, *(int(minor) for minor in SYMBOL.findall(library))])
            path = Path(self._made.name) / f"{level.name}.so"
            path.write_bytes(library)
            build_data["force_include"][str(path)] = f"engine/kernels/built/{level.name}.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{glibc}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which the wheel has."""
        if version != "editable":
            self._made.cleanup()
