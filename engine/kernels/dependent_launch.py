"""Programmatic dependent launch (PDL): a kernel begins while its predecessor in the stream still ends.

Owns: where it is used, and the calls that a kernel makes for it.  Does not know: which kernels there are.

From Hopper on, a kernel launched in this way is set up, and reads data that no kernel writes, while its predecessor
runs; then it waits until that is complete.  Three rules keep the order of a stream:

- Every program waits before it reads what a kernel may have written and before it writes anything, even if it has
  nothing to do: a grid that ended earlier would let the next kernel overtake those before it.
- The wait is at the top, outside of loops: the compiler starts a loop's pipelined load before the loop.
- A kernel lets the next one begin only if no successor may read its results too early.  Libraries read lists of pages
  and lengths before they wait (FlashInfer's decode kernel does), so kernels that make such lists never call
  ``let_next_begin``; the next kernel then begins when all of it is done.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = 9
LAUNCHED_EARLY: Mapping[str, bool] = {"PDL": True, "launch_pdl": True}
IN_ORDER: Mapping[str, bool] = {"PDL": False}


def launch_options(device: torch.device) -> Mapping[str, bool]:
    """Return the PDL options of a launch on the device: the kernel's constant, and triton's option."""
    return LAUNCHED_EARLY if has_dependent_launch(device) else IN_ORDER


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether the device is a GPU from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until earlier kernels are complete, so that their results can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Allow the setup of the next kernel once every program of this one has called it.  Call it after the wait."""
    if PDL:
        gdc_launch_dependents()
