"""Choice of what computes a device's operations between the large products: this project's kernels, or torch.

Owns: the choice, its reasons, and the way to force it.  Does not know: kernels, before they are chosen.

Kernels are chosen on an NVIDIA GPU if triton can be imported and one small kernel runs.  For debugging, the
environment variable CALLBOARD_KERNELS=torch turns all of them off; CALLBOARD_KERNELS=triton turns a missing triton into
an error, and with TRITON_INTERPRET=1, set before Python starts, runs them on the CPU, thousands of times slower.
"""

import functools
import logging
import os
from typing import TYPE_CHECKING

import torch

from engine.settings.own_kernels import VARIABLE, missing_for_triton
from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.kernels.fused import FusedKernels

log = logging.getLogger(__name__)


def choose_kernels(device: torch.device) -> "FusedKernels | None":
    """Return the kernels to use on a device; None for torch.  The first call for a device logs the choice.

    Raises ConfigError if the environment requires kernels that cannot run.
    """
    return _choose(device.type, os.environ.get(VARIABLE, ""))


@functools.cache
def _choose(device_type: str, wanted: str) -> "FusedKernels | None":
    if wanted not in ("", "torch", "triton"):
        raise ConfigError(f"{VARIABLE}={wanted}: must be torch or triton, or not be set")
    if device_type != "cuda" and wanted != "triton":
        return None  # the normal case on a CPU: nothing to log
    if wanted == "torch":
        log.info("kernels: torch (%s=torch)", VARIABLE)
        return None
    problem = "" if device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "TRITON_INTERPRET is not 1"
    if not problem:
        try:
            from engine.kernels.fused import FusedKernels

            kernels = FusedKernels(device_type)
            kernels.try_out()
        except Exception as error:  # no triton, no C compiler for its launchers, a GPU it does not know
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            log.info("kernels: triton (%s)", f"{VARIABLE}=triton" if wanted else "an NVIDIA GPU is present")
            return kernels
    if wanted:
        raise ConfigError(f"{VARIABLE}=triton: kernels cannot run on {device_type!r} here ({problem})")
    log.error(
        "kernels: torch, with which this GPU is 10 to 30 times slower and no decode step is recorded whole: %s. %s, "
        "and start again; %s=torch accepts that",
        problem,
        missing_for_triton() or "Free the GPU's memory, or name a folder that can be written in TRITON_CACHE_DIR",
        VARIABLE,
    )
    return None
