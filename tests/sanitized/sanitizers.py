"""The sanitizers of the C compiler: their libraries, their flags, and the kernels compiled with both.

Owns: what a process needs before it starts, and the flags of the compiler.  Does not know: which calls are made.
"""

import ctypes
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from engine.kernels import compiled, panels, sources
from engine.kernels.levels import LEVELS, Level, levels_here
from engine.kernels.library import Making
from engine.settings.own_kernels import c_compiler
from tests.kernels.emulation import emulated

HEADER = Path(__file__).parent / "memory.h"
# -O1 compiles in seconds, and stays behind what a source says of itself.
FLAGS = (
    *("-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined,float-cast-overflow"),
    *("-fno-sanitize-recover=all", "-include", str(HEADER), "-O1"),
)
LIBRARIES = ("libasan.so", "libubsan.so")
# Memory that C takes and does not write is NaN.  Python frees little before it ends, which is no leak of ours.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255:handle_segv=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@cache
def missing() -> str:
    """The tool that this machine lacks; empty where kernels can be compiled with sanitizers and called."""
    compiler = c_compiler()
    if not compiler:
        return "there is no C compiler"
    if not all(Path(one).is_file() for one in _libraries(compiler)):
        return f"{shlex.join(compiler)} has no libraries of its sanitizers"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.c"
        source.write_text("int nothing;")
        done = subprocess.run([*compiler, *FLAGS, "-c", str(source), "-o", f"{folder}/empty.o"], capture_output=True)
        if done.returncode:
            return f"{shlex.join(compiler)} has no sanitizers: {done.stderr.decode(errors='replace').strip()[:200]}"
        done = subprocess.run([sys.executable, "-c", ""], capture_output=True, env={**os.environ, **environment()})
    return f"Python does not run with them: {done.stderr.decode(errors='replace')[-200:]}" if done.returncode else ""


def environment() -> dict[str, str]:
    """The environment that a process must start with, so that the kernels find their sanitizers."""
    compiler = c_compiler()
    assert compiler, "there is no C compiler"
    return {"LD_PRELOAD": " ".join(_libraries(compiler)), **OPTIONS}


def _libraries(compiler: list[str]) -> list[str]:
    asked = ([*compiler, f"-print-file-name={name}"] for name in LIBRARIES)
    return [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked]


def best() -> Level:
    """The level that the kernels have here."""
    return levels_here(torch.backends.cpu.get_cpu_capability())[0]


def levels() -> tuple[Level, ...]:
    """Kinds of CPUs of which this one is, or can act, from one without vectors to the widest."""
    here = levels_here(torch.backends.cpu.get_cpu_capability())
    lacking = (emulated(one) for one in LEVELS if one not in here)
    acted = [one for one in lacking if one is not None and one.needs <= here[0].needs]
    return (*here[::-1], *acted)


def compile_for(level: str) -> None:
    """All kernels that this process calls are from now on of this level, and sanitized."""
    (chosen,) = (one for one in levels() if one.name == level)
    compiled.levels_here = lambda capability: [chosen]
    sources.SOURCES = {name: (*flags, *FLAGS, "-DWITH_ALL_TILES") for name, flags in sources.SOURCES.items()}
    # One library with all tiles, as a wheel's: the seconds are for calls.
    every = sources.every_unit()
    sources.units = lambda parts=(): every
    Making._with_way = lambda self, library, way: library
    # A panel that ends with its memory: a read behind it is seen.
    panels.ALIGNMENT = 1
    # What torch makes and no operation writes is NaN.
    torch.use_deterministic_algorithms(True)


@contextmanager
def mallocs(count: int):
    """So many calls of malloc succeed, and none after them.  Calls the result: how many there were."""
    library = compiled.compiled()
    assert library is not None
    left = ctypes.c_int64.in_dll(library, "mallocs_left")
    before, left.value = left.value, count
    try:
        yield lambda: count - left.value
    finally:
        left.value = before
