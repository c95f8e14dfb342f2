"""How fast a device copies and multiplies: what rooflines and shares of bandwidth are taken of.

Owns: the two figures, the clock they are taken by.  Does not know: what is compared with them.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

TRIALS = 8


def copied_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy that is larger than any cache."""
    size = 1 << (30 if device.type == "cuda" else 27)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).fill_(1) for _ in range(2))
    return 2 * size / _best_s(lambda: target.copy_(source), device)


def operations_per_s(device: torch.device) -> float:
    """Of a large matrix product in the type that the model computes in; a multiplication and an addition are two."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: left @ right, device)


def _best_s(work: Callable[[], Any], device: torch.device) -> float:
    """Of some calls, as nothing that a machine does beside them makes them faster."""
    return min(_gpu_s(work) if device.type == "cuda" else _host_s(work) for _ in range(TRIALS))


def _host_s(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _gpu_s(work: Callable[[], Any]) -> float:
    """By the GPU's own clock.  It does the work once before, so that the second is queued when the clock starts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
