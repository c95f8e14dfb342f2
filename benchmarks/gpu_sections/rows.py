"""What a section gives: rows, and the clock they are timed with."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]  # case, ok, and of the rest what the section has: error, us, tokens_per_s, ... or problem


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Median of 20 calls, each waited for."""
    times = []
    for _ in range(23):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:]))
