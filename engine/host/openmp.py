"""The waiting of OpenMP's threads for each other, which begins by spinning.

Owns: for how long they spin.  Does not know: torch, which brings OpenMP and reads this when it is imported.
A thread that spins keeps a core from the thread that it waits for.  GNU OpenMP does so for milliseconds: beside other
programs on the same two cores a decode step of 135 million parameters took 1,940 ms, with 300 spins 130.
"""

import os

# About 20 us: more than the work between two products of a step, and less than it costs to wait for a core.
SPINS = "1000"
POLICY = "OMP_WAIT_POLICY"  # of any OpenMP; where it is set, nothing else is


def wait_briefly() -> None:
    """Let threads sleep after a short wait, in this process and its children, unless the environment says otherwise.

    Call it before torch is imported."""
    if POLICY not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # LLVM's, in ms
