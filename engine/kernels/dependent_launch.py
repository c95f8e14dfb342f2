"""Programmatic dependent launch (PDL): a kernel begins while the one in front of it in the stream still ends.

Owns: where it is used, and what a kernel says for it.  Does not know: which kernels there are.

On GPUs from Hopper on a kernel that is launched so is set up, and reads what no kernel writes, while its predecessor
runs; then it waits for that to be complete.  Three rules keep the order of a stream:

- Every program waits, before it reads what a kernel may have written and before it writes anything, also if it has
  nothing to do: a grid that ended earlier would let the next one pass the kernels in front of it.
- The wait stands at the top, outside of loops: a pipelined load of a loop is begun in front of the loop.
- A kernel lets the next one begin only if that may read its results early nowhere.  Libraries read lists of pages and
  lengths before they wait (FlashInfer's decode kernel does), so what makes such lists never says ``let_next_begin``;
  the next kernel then begins when all of it is done.
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
    """What a launch on the device is given beside its arguments: the constant PDL, and triton's option."""
    return LAUNCHED_EARLY if has_dependent_launch(device) else IN_ORDER


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether it is a GPU from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= HOPPER


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernels in front are complete, and what they wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next kernel be set up once every program of this one has come here.  It comes after the wait."""
    if PDL:
        gdc_launch_dependents()
