"""The waiting of this process's threads for each other: for a product's other half, and for the interpreter.

Owns: how long they keep what another one waits for.
Does not know: torch, which brings OpenMP and reads this when it is imported.
A thread of OpenMP that spins keeps a core from the thread that it waits for.  GNU OpenMP does so for milliseconds:
beside other programs on the same two cores a decode step of 135 million parameters took 1,940 ms, with 300 spins 130.
A thread that runs Python keeps the interpreter from others for 5 ms.  The event loop has a step's result to send then,
and the device's thread begins the next step: a fast model's tokens wait several steps.
"""

import os
import sys

# About 20 us: more than the work between two products of a step, and less than it costs to wait for a core.
SPINS = "1000"
POLICY = "OMP_WAIT_POLICY"  # of any OpenMP; where it is set, nothing else is
SWITCH_S = 3e-4  # shorter than a step of a small model


def wait_briefly() -> None:
    """Let threads wait for each other briefly, those of OpenMP in children too, unless the environment says otherwise.

    Call it before torch is imported."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
    if POLICY not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # LLVM's, in ms
