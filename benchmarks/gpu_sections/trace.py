"""What a device did while something ran, in order, as the profiler saw it.

Owns: spans of work, and what is read off them.  Does not know: what ran.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, order=True)
class Span:
    """A kernel or a copy; on a CPU, where the script tries itself, an operation.  Times in microseconds."""

    start_us: float
    end_us: float
    name: str


def traced(work: Callable[[], object], device: torch.device) -> list[Span]:
    """Everything that ``work`` has the device do; it must wait for the end of it."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        work()
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return sorted(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == kind
    )


def num_copies_in(spans: Sequence[Span]) -> int:
    """Copies from the host to the device."""
    return sum("HtoD" in span.name for span in spans)


def idle_gap_s(spans: Sequence[Span], num_steps: int) -> float:
    """Median time that the device has nothing to do between two steps."""
    gaps, end = [], spans[0].end_us
    for span in spans:
        gaps.append(span.start_us - end)
        end = max(end, span.end_us)
    # One between each two steps: they are the widest.
    widest = sorted(gaps)[-(num_steps - 1) :]
    return max(0.0, widest[len(widest) // 2]) * 1e-6
