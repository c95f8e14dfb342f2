"""What a section gives: rows, and the two clocks they are timed with."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]  # case, ok, and of the rest what the section has: error, us, tokens_per_s, ... or problem
CALLS, REPLAYS = 20, 8
# What a kernel reads and writes must be more than this for its bandwidth to be that of memory: caches hold up to 60 MB.
UNCACHED_BYTES = 256 << 20


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


def device_seconds(work: Callable[[], Any], device: torch.device, calls: int = CALLS) -> float:
    """One call's share of a graph of many; on a CPU, where the script tries itself, of one plain call."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                work()
        times = []
        for _ in range(REPLAYS):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            graph.replay()
            end_event.record()
            end_event.synchronize()
            times.append(start_event.elapsed_time(end_event) / 1e3 / calls)
    return float(np.median(times[3:]))
