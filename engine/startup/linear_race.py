"""Linear kernels measured against each other on a model's own shapes.

Owns: which products are timed, and what a result holds for.  Does not know: which kernels there are.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor

from engine.host.contest import Contest
from engine.host.cpuinfo import cpu_entry
from engine.host.kept_results import KeptResults
from engine.layers.packing import LinearKernel

Shapes = list[tuple[int, int]]
ROWS = (1, 8, 64)  # a single decode step, one of a small batch, and a short prompt or a large batch
TURNS = 5
# Bytes of weights that take turns: more than caches hold, as in a step, or all that the model has.
MEASURED_BYTES = 64 << 20
SMALL_BYTES = 4 << 20  # a model with less than this is not worth measuring
MAX_OUTPUTS = 8192  # of a measured weight: further rows of an LM head cost what those before do


class LinearRace:
    """A race of kernels, in turns over random weights, once per machine, shapes and number of threads."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def seconds(self, kernels: Mapping[str, LinearKernel], shapes: Shapes) -> Mapping[str, float]:
        """Return kernel -> geometric mean over ROWS of the seconds for all shapes; empty for a small model."""
        shapes = self._measured(shapes)
        if not shapes:
            return {}
        processor = processor_name(self._device)
        holds_for = (sorted(kernels), shapes, str(self._dtype), torch.get_num_threads(), str(torch.__version__))
        kept = KeptResults("linear kernels", processor, holds_for, dict[str, float])
        known = kept.load()
        if known is None:
            known = self._measure(kernels, shapes)
            kept.keep(known)
        return known

    def _measured(self, shapes: Shapes) -> Shapes:
        if sum(outputs * inputs for outputs, inputs in shapes) * self._dtype.itemsize < SMALL_BYTES:
            return []
        chosen: Shapes = []
        room = MEASURED_BYTES
        # From both ends: the layers are all the same, and the LM head is last.
        for outputs, inputs in [shapes[-1], *shapes[:-1]]:
            if not outputs:
                continue  # the head of a model that has none
            chosen.append((min(outputs, MAX_OUTPUTS), inputs))
            room -= chosen[-1][0] * inputs * self._dtype.itemsize
            if room < 0:
                break
        return chosen

    @torch.inference_mode()
    def _measure(self, kernels: Mapping[str, LinearKernel], shapes: Shapes) -> dict[str, float]:
        # Values that a checkpoint of any dtype has: some kernels take no others.
        drawn = [torch.randn(shape, dtype=torch.bfloat16, device=self._device) for shape in shapes]
        weights = [weight.to(self._dtype) for weight in drawn]
        packed = {name: [(kernel.pack(one) or _Plain(one)) for one in weights] for name, kernel in kernels.items()}
        inputs = {
            (rows, size): torch.randn(rows, size, dtype=self._dtype, device=self._device)
            for rows in ROWS
            for _, size in shapes
        }

        def multiply(name: str, rows: int) -> None:
            for weight, (_, size) in zip(packed[name], shapes, strict=True):
                weight(inputs[rows, size], None)

        runs = {case: self._repeatable(partial(multiply, *case)) for case in product(kernels, ROWS)}

        def seconds(name: str, rows: int) -> float:
            start = time.perf_counter()
            runs[name, rows]()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        times = Contest(seconds, ROWS, turns=TURNS).run(kernels)
        if runs and self._device.type == "cuda":
            runs.clear()
            torch.cuda.empty_cache()  # the pool of KV pages is sized by what is free
        return {name: statistics.geometric_mean(of_rows) for name, of_rows in times.items()}

    def _repeatable(self, work: Callable[[], None]) -> Callable[[], object]:
        """Return what does the work again.  On a GPU that is a graph, as in decode steps: the time that the host takes
        to launch kernels does not count there."""
        if self._device.type != "cuda":
            return work
        work()  # compiles kernels, and libraries choose theirs
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay


class _Plain:
    """The product of a weight that its kernel leaves as it is."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x_TI, self._weight_OI, bias_O)


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with the instruction set that torch's kernels use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_entry('model name') or platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
