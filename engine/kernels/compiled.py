"""The library of the C sources of this folder for this kind of CPU: from the wheel, or compiled once.

Owns: the choice.  Does not know: how it is compiled, what the functions compute.
"""

import functools
import logging
import os
import shlex
import subprocess

import torch

from engine.kernels import sources
from engine.kernels.levels import Level, levels_here
from engine.kernels.library import KernelLibrary, Making
from engine.settings.own_kernels import BUILT, VARIABLE, c_compiler

log = logging.getLogger(__name__)


@functools.cache
def compiled() -> KernelLibrary | None:
    """Return the library: the wheel's for this CPU, or compiled at the first start; None, so that torch computes, if
    there is neither.

    Also None if the environment variable CALLBOARD_KERNELS is torch or triton."""
    if os.environ.get(VARIABLE):
        return None
    levels = levels_here(torch.backends.cpu.get_cpu_capability())
    if (library := _built(levels)) is not None:
        return library
    compiler = c_compiler()
    if not compiler:
        if given := os.environ.get("CC"):
            log.warning("kernels: torch (CC=%r names no program here; correct it, or unset it to use cc)", given)
        else:
            log.info("kernels: torch (there is no C compiler; with one a small model's steps are shorter)")
        return None
    names = ", ".join(name for name, _ in sources.units())
    try:
        library = Making.for_levels(compiler, levels).library()
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("kernels: torch (%s cannot compile %s: %s)", shlex.join(compiler), names, error)
        return None
    log.info("kernels: %s, compiled by %s", names, shlex.join(compiler))
    return library


def _built(levels: list[Level]) -> KernelLibrary | None:
    """Return the wheel's library of the best level that it has; None if it has none that can be loaded here."""
    for level in levels:
        path = BUILT / f"{level.name}.so"
        if path.is_file():
            try:
                library = KernelLibrary(str(path))
            except OSError as error:  # this torch has another OpenMP, or this system another C library
                log.warning("kernels: %s cannot be loaded here: %s", path, error)
                continue
            log.info("kernels: for %s, of the wheel", level.name)
            return library
    return None
