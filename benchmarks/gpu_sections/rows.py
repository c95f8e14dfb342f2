"""What a section gives: rows, the two clocks they are timed with, and graphs of a section's own work."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Row = dict[str, Any]  # case, ok, and of the rest what the section has: error, us, tokens_per_s, ... or problem
WARM_UPS, CALLS, REPLAYS = 3, 20, 8
# What a kernel reads and writes must be more than this for its bandwidth to be that of memory: caches hold up to 60 MB.
UNCACHED_BYTES = 256 << 20


def skipped(reason: str, case: str = "(section)") -> Row:
    """What cannot be tried here, which is no failure."""
    return {"case": case, "ok": True, "problem": f"skipped: {reason}"}


def captured(work: Callable[[], list[Tensor]], device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """(does ``work`` again on the same memory, what it writes there): a graph, or where there is none ``work`` itself.

    Kernels must be loaded: ``work`` was done once before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = work()
        return graph.replay, outs
    outs = work()
    return lambda: [out.copy_(new) for out, new in zip(outs, work(), strict=True)], outs


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Median of 20 calls, each waited for; on a CPU, where the script tries itself, one call."""
    times = []
    warm_ups, calls = (WARM_UPS, CALLS) if device.type == "cuda" else (0, 1)
    for _ in range(warm_ups + calls):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[warm_ups:]))


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
