"""Linear kernels measured against each other on a model's own shapes.

Owns: the measurement, and the file that keeps its result for the next start.  Does not know: which kernels there are.
"""

import hashlib
import logging
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.host.cache_folder import cache_folder, replace_file
from engine.layers.packing import LinearKernel

log = logging.getLogger(__name__)

Shapes = list[tuple[int, int]]
ROWS = (1, 8, 64)  # a decode step alone, of a small batch, and a short prompt or a large batch
TURNS = 5
# So many weights take turns: more than caches hold, as in a step, or all that the model has.
MEASURED_BYTES = 64 << 20
SMALL_BYTES = 4 << 20  # a model with less than this is not worth measuring
MAX_OUTPUTS = 8192  # of a measured weight: rows of an LM head beyond it cost what those before do


class Race:
    """Kernels in turns over random weights of given shapes, once per machine, shapes and number of threads."""

    def __init__(self, device: torch.device, dtype: torch.dtype, path: Path | None = None) -> None:
        """path: of the file with results; None for the user's cache."""
        self._device = device
        self._dtype = dtype
        self._path = path or cache_folder("linear.json")

    def seconds(self, kernels: Mapping[str, LinearKernel], shapes: Shapes) -> Mapping[str, float]:
        """Geometric mean over ROWS of the time for all shapes, per kernel; empty for a small model."""
        shapes = self._measured(shapes)
        if not shapes:
            return {}
        what = (
            sorted(kernels),
            shapes,
            str(self._dtype),
            torch.get_num_threads(),
            str(torch.__version__),
            _processor(self._device),
        )
        key = hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]
        known = _load(self._path)
        if key not in known:
            known[key] = self._measure(kernels, shapes)
            _save(self._path, known)
        return known[key]

    def _measured(self, shapes: Shapes) -> Shapes:
        if sum(outputs * inputs for outputs, inputs in shapes) * self._dtype.itemsize < SMALL_BYTES:
            return []
        chosen: Shapes = []
        room = MEASURED_BYTES
        # From both ends: layers are alike, and the LM head is last.
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
        means = dict.fromkeys(kernels, 1.0)
        for rows in ROWS:
            inputs = {size: torch.randn(rows, size, dtype=self._dtype, device=self._device) for _, size in shapes}
            best = dict.fromkeys(kernels, float("inf"))
            for _ in range(TURNS):
                for name, products in packed.items():
                    start = time.perf_counter()
                    for product, (_, size) in zip(products, shapes, strict=True):
                        product(inputs[size], None)
                    if self._device.type == "cuda":
                        torch.cuda.synchronize()
                    best[name] = min(best[name], time.perf_counter() - start)
            means = {name: mean * best[name] ** (1 / len(ROWS)) for name, mean in means.items()}
        return means


class _Plain:
    """What a layer does with a weight that its kernel leaves as it is."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x_TI, self._weight_OI, bias_O)


def _processor(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with what torch's kernels use of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def _load(path: Path | None) -> dict[str, dict[str, float]]:
    """The results in the file; none if it is missing or broken, which costs a measurement and nothing else."""
    try:
        return {} if path is None else msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, float]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("linear kernels: measurements in %s are not used: %s", path, error)
        return {}


def _save(path: Path | None, known: dict[str, dict[str, float]]) -> None:
    try:
        if path is not None:
            replace_file(path, msgspec.json.encode(known))
    except OSError as error:
        log.warning("linear kernels: measurements are not kept for the next start: %s", error)
