"""The conformance kit for communication libraries: all collectives, on every rank of groups of several sizes.

    from engine.plugins.testing.comm import check_comm
    check_comm(lambda size: [MyComm(rank, size) for rank in range(size)])

A library that needs processes as ranks starts them itself, and calls ``check_rank`` in each.

Owns: the groups, their time limit.  Does not know: how ranks reach each other, what one rank checks.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.layers.comm import Comm
from engine.plugins.proof.comm import check_rank
from engine.plugins.proof.findings import Findings

TIMEOUT_S = 60.0  # for all of one group's cases


def check_comm(
    make_group: Callable[[int], Sequence[Comm]], sizes: Sequence[int] = (1, 2, 3), device: str = "cpu"
) -> None:
    """Run ``check_rank`` on every rank of a group of each size, each on a thread of its own.

    make_group: size -> the ranks of a new group, in order; called on the caller's thread.
    Raises ConformanceError with every case that fails; a group that hangs is a failed case.
    """
    findings = Findings(f"communication on {device}")
    for size in sizes:
        with findings.case(f"{size} ranks"):
            _check_group(make_group(size), size, device)
    findings.conclude()


def _check_group(group: Sequence[Comm], size: int, device: str) -> None:
    placed = [(comm.rank, comm.size) for comm in group]
    assert placed == [(rank, size) for rank in range(size)], f"(rank, size) of the group's ranks is {placed}"
    alike: dict[int, list[Tensor]] = {}
    errors: dict[int, BaseException] = {}

    def run(comm: Comm) -> None:
        try:
            alike[comm.rank] = check_rank(comm, device)
        except BaseException as error:
            errors[comm.rank] = error

    # A thread that hangs ends with the process.
    threads = [threading.Thread(target=run, args=(comm,), name=f"rank{comm.rank}", daemon=True) for comm in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not errors, " | ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} were not done after {TIMEOUT_S:g} s"
    for rank in range(1, size):
        for index, (theirs, first) in enumerate(zip(alike[rank], alike[0], strict=True)):
            assert torch.equal(theirs, first), (
                f"result {index} is not the same to the bit on ranks 0 and {rank}, so they would diverge"
            )
