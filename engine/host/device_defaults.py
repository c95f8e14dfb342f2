"""Values for 0 and 'auto' in settings that depend on the device: rows, tokens of a step, placement, the pool's share.

Owns: inspecting the machine, the numbers, the log line that shows them.  Does not know: models, or torch, which is not
imported yet at this point; ``engine/execution/device.py`` opens the device.
"""

import ctypes
import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import msgspec

from engine.config import Config

log = logging.getLogger(__name__)

GIB = 1 << 30
MAJOR_CAPABILITY = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
LARGE_GPU_BYTES = 64 * GIB  # from here on the weights of most models leave room for the KV of 512 sequences


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Values of the settings with these names."""

    max_running: int
    max_step_tokens: int
    prefill_chunk: int
    memory_fraction: float
    executor: Literal["inline", "process"]


# Steps of a CPU grow with the batch, and its pool lies in the memory that everything else needs.
CPU = DeviceDefaults(64, 2048, 512, 0.85, "inline")
# A GPU's decode steps take as long for a few rows as for many, and the host's loop must not wait for HTTP meanwhile.
GPU = DeviceDefaults(256, 8192, 2048, 0.9, "process")
LARGE_GPU = DeviceDefaults(512, 8192, 2048, 0.9, "process")


def with_device_defaults(config: Config, several_machines: bool = False) -> Config:
    """Return ``config`` with 0 and 'auto' replaced in these settings; a log line shows the chosen values.

    Settings of the user are kept and the others are fitted to them.  several_machines: ranks must be processes."""
    defaults, reason = _choose(config.device.kind)
    scheduler, placement = config.scheduler, config.placement
    tokens = scheduler.max_step_tokens or max(defaults.max_step_tokens, scheduler.max_running)
    chosen: dict[str, dict[str, Any]] = {"scheduler": {}, "kv": {}, "placement": {}}
    if not scheduler.max_running:
        chosen["scheduler"]["max_running"] = min(defaults.max_running, tokens)
    if not scheduler.max_step_tokens:
        chosen["scheduler"]["max_step_tokens"] = tokens
    if not scheduler.prefill_chunk:
        chosen["scheduler"]["prefill_chunk"] = min(defaults.prefill_chunk, tokens)
    if not config.kv.memory_fraction:
        chosen["kv"]["memory_fraction"] = defaults.memory_fraction
    if placement.executor == "auto":
        chosen["placement"]["executor"] = "process" if several_machines else defaults.executor
    shown = [f"{section}.{key}={value}" for section, keys in chosen.items() for key, value in keys.items()]
    if shown:
        log.info("auto: %s (%s)", " ".join(shown), reason)
    sections = {
        section: msgspec.structs.replace(getattr(config, section), **keys) for section, keys in chosen.items() if keys
    }
    return msgspec.structs.replace(config, **sections)


def _choose(kind: str) -> tuple[DeviceDefaults, str]:
    """Return the defaults and their reason.  kind: the setting ``device.kind``."""
    if kind == "cpu":
        return CPU, "device.kind=cpu"
    if kind == "auto" and not torch_may_use_gpus():
        return CPU, "torch is built for CPUs alone"
    num_bytes = gpu_bytes()
    if kind == "auto" and not num_bytes:
        return CPU, "no GPU is present"
    reason = f"a GPU of {num_bytes / GIB:.0f} GiB" if num_bytes else "device.kind=cuda"
    return LARGE_GPU if num_bytes >= LARGE_GPU_BYTES else GPU, reason


def runs_on_cpu(kind: str) -> bool:
    """Whether a model will run on a CPU, as far as is known before torch is imported.  kind: ``device.kind``."""
    return _choose(kind)[0] is CPU


def torch_may_use_gpus() -> bool:
    """Whether torch may be built for GPUs; False if its version says it is built for CPUs alone."""
    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return True  # built from source: torch itself decides later


def multiplies_float8_blocks() -> bool:
    """Return whether torch is built for a CUDA that has products of float8 with a scale per block, 12.9 or later, as
    far as its version says."""
    try:
        _, _, cuda = version("torch").partition("+cu12")
    except PackageNotFoundError:
        return False  # built from source: a product in float8 must be asked for
    return not cuda or cuda.startswith("9")


def driver_cuda() -> str:
    """Return the CUDA version of the driver, such as '12.8'; '' without a driver."""
    found = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def gpu_bytes() -> int:
    """Return the memory of the first visible GPU in bytes, read from the driver's library; 0 if there is none."""
    total = ctypes.c_size_t()
    return total.value if _driver_says("cuDeviceTotalMem_v2", total) else 0


def gpu_generation() -> int:
    """Return the major number of the first visible GPU's compute capability, 9 for Hopper; 0 if there is none."""
    major = ctypes.c_int()
    return major.value if _driver_says("cuDeviceGetAttribute", major, MAJOR_CAPABILITY) else 0


def _driver_says(function: str, result: Any, *arguments: int) -> bool:
    """Fill ``result`` by a function of the driver's library for the first visible GPU; return whether that worked."""
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
        return not (failed or getattr(driver, function)(ctypes.byref(result), *arguments, device))
    except (OSError, AttributeError):  # no driver, or it lacks these functions
        return False
