"""The process of a trial: sums and norms in memory of several GPUs, compared with those of a rank alone.

Owns: what is computed.  Does not know: the engine, what its result is used for.

    python -m engine.plugins.comm.symmetric.trial_process RANK SIZE GPU RENDEZVOUS ONE_SHOT TWO_SHOT BY_SWITCH SECONDS
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.plugins.comm.symmetric.memory import ALIGNMENT, DTYPES, Limits, PeerMemory, SharedMemory
from engine.plugins.hookspecs import CommContext
from engine.plugins.support.rendezvous import open_store

NAME = "the trial of comm.symmetric"
TURNS = 3  # a sum finds what the one before has left
WIDTH = 1024
EPS = 1e-6
ALLOWED = 2e-2  # of a norm, whose order of adding is the kernel's


def check_memory(memory: SharedMemory, rank: int, size: int, device: str, num_bytes: Sequence[int]) -> None:
    """Compare sums of these sizes, and a norm, with those of a rank alone.  Raises AssertionError.

    All ranks call it at once.  Numbers are so small that their sums are exact in each type."""
    for dtype in DTYPES:
        for one in num_bytes:
            own = torch.empty(one // dtype.itemsize, dtype=dtype, device=device)
            _repeat(device, partial(memory.sum_into, own), own, rank, size)
        rows = torch.empty(2, WIDTH, dtype=dtype, device=device)
        _check_norm(memory, rows, rank, size)


def _repeat(device: str, work: Callable[[], None], own: Tensor, rank: int, size: int) -> None:
    """Do the work some times over, on a GPU also as a graph replays it, and compare what it leaves in ``own``."""
    source = torch.empty_like(own)

    def step() -> None:
        own.copy_(source)
        work()

    def compare(run: Callable[[], None], what: str) -> None:
        for turn in range(TURNS):
            source.copy_(numbers(own, rank, turn))
            run()
            expected = torch.stack([numbers(own, one, turn) for one in range(size)]).sum(0)
            assert torch.equal(own, expected), f"{what} of {own.nbytes} bytes is wrong"

    compare(step, f"a sum in {own.dtype}")
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        compare(graph.replay, f"a replayed sum in {own.dtype}")
        graph.reset()


def _check_norm(memory: SharedMemory, rows: Tensor, rank: int, size: int) -> None:
    weight = torch.ones(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    for turn in range(TURNS):
        x, part = torch.ones_like(rows), numbers(rows, rank, turn)
        normed = memory.add_norm(x, part, weight, EPS)
        if normed is None:
            return
        expected = 1 + torch.stack([numbers(rows, one, turn) for one in range(size)]).sum(0)
        assert torch.equal(x, expected), f"a sum with a norm in {rows.dtype} is wrong"
        exact = torch.nn.functional.rms_norm(expected.float(), (rows.shape[-1],), eps=EPS)
        error = (normed.float() - exact).abs().max().item()
        assert error <= ALLOWED, f"a norm in {rows.dtype} is off by {error:.3g}"


def numbers(like: Tensor, rank: int, turn: int) -> Tensor:
    """Return a rank's numbers in a turn, of at most 28, so that all can compute those of all."""
    places = torch.arange(1, like.numel() + 1, device=like.device).view(like.shape)
    return (places * (2 * rank + 3) * (turn + 2) // 5 % 29).to(like.dtype)


def main(rank: str, size: str, gpu: str, rendezvous: str, *numbers: str) -> None:
    """Check the memory of this rank's GPU.  numbers: the three limits of sums, and seconds."""
    *sizes, limit_s = numbers
    signal.alarm(int(float(limit_s)) + 1)  # the kernel ends this process, even if all here hangs and the engine is gone
    threading.Thread(target=end_with_starter, args=(sys.stdin.fileno(),), name="trial-starter", daemon=True).start()
    torch.cuda.set_device(int(gpu))
    context = CommContext(int(rank), int(size), "cuda", rendezvous)
    store = open_store(NAME, rendezvous, context.rank, context.size, float(limit_s))
    limits = Limits(*map(int, sizes))
    memory = PeerMemory(store, context, limits)
    check_memory(memory, context.rank, context.size, "cuda", sizes_tried(limits, context.size))
    torch.cuda.synchronize()
    store.set(f"right{rank}", "1")
    store.wait([f"right{one}" for one in range(context.size)])  # until then others read this rank's memory
    os._exit(0)  # what libraries do at the end is no part of the trial


def end_with_starter(pipe: int) -> None:
    """Wait until the starting process is gone, then kill this one and all that it has started.

    The engine's next start finds the GPU's memory free."""
    os.read(pipe, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def sizes_tried(limits: Limits, num_ranks: int) -> list[int]:
    """Return sizes of sums: of the switch if it sums, else for both other ways; at their borders, in whole loads."""
    unit = ALIGNMENT * num_ranks
    least, most = limits.two_shot if limits.by_switch else 0, limits.most
    middle = least if limits.by_switch else limits.one_shot
    wanted = (least + unit, middle, middle + unit, (middle + most) // 2, most)
    return sorted({whole for one in wanted if least < (whole := one // unit * unit) <= most})


if __name__ == "__main__":
    main(*sys.argv[1:])
