"""The device a rank runs on: which one, with how many threads, in which dtype, and how much memory it has left.

Owns: the choice and its reasons.  Does not know: models, pools.
"""

import logging
import os
import socket
import zlib
from pathlib import Path

import torch

from engine.host.device_defaults import driver_cuda, gpu_bytes
from engine.host.memory import available_bytes
from engine.layers.comm import Comm
from engine.settings.sections import DeviceSection
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL_MODEL_BYTES = 64 << 20
TINY_MODEL_BYTES = 4 << 20  # with less than this one thread is best anywhere


def choose_device(section: DeviceSection, rank: int) -> torch.device:
    """The torch device of a rank.  Raises ConfigError if there is no GPU to take, or one that torch cannot use."""
    kind, present = section.kind, torch.cuda.is_available()
    if kind != "cpu" and not present and torch.version.cuda and gpu_bytes():
        driver = f"CUDA {driver_cuda()}"
        raise ConfigError(
            f"device.kind={kind}: torch {torch.__version__}, made for CUDA {torch.version.cuda}, cannot use the GPU "
            f"that is here, whose driver is made for {driver}; renew the driver, install a torch for {driver} "
            "(https://pytorch.org), or set device.kind=cpu"
        )
    if kind == "auto":
        kind = "cuda" if present else "cpu"
        log.info("device: %s (%s)", kind, "a GPU is present" if present else "no GPU is present")
    if kind == "cuda":
        if not present:
            raise ConfigError("device.kind=cuda: torch sees no GPU here; install torch for CUDA or use device.kind=cpu")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def set_threads(setting: int, device: torch.device, weight_bytes: int) -> tuple[int, ...]:
    """``device.threads``, or for 0 one for a small model, else every core.  Call it on the thread that runs it.

    Returns the numbers that are worth measuring once the model is there; () if the one that is set stands.

    A small model's operations are so short that threads wait for each other longer than they work, and when another
    program takes a core they wait for its time slice at every operation: beside two busy processes on two cores
    the demo model gave 2,270 tokens/s in batches of 8 with one thread, and 20 to 160 with two.
    """
    if device.type != "cpu":
        return ()
    choices = (setting,) if setting else thread_choices()
    threads = choices[0] if weight_bytes < SMALL_MODEL_BYTES else choices[-1]
    torch.set_num_threads(threads)
    if len(choices) > 1 and weight_bytes >= TINY_MODEL_BYTES:
        return choices
    reason = (
        "device.threads" if setting else f"auto: {weight_bytes / 1e6:.1f} MB of weights, up to {choices[-1]} threads"
    )
    log.info("threads: %d (%s)", threads, reason)
    return ()


def thread_choices(root: Path = Path("/")) -> tuple[int, ...]:
    """Powers of two up to the number of physical cores that this process may run on, and that number.

    Not more than OMP_NUM_THREADS, where that is set.  root: where /sys is."""
    allowed = os.sched_getaffinity(0)
    siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed)
    cores = len({path.read_text() if path.exists() else path for path in siblings})
    asked = os.environ.get("OMP_NUM_THREADS", "")
    most = min(cores, max(1, int(asked))) if asked.isdecimal() else cores
    return tuple(sorted({most, *(1 << bit for bit in range(most.bit_length()))}))


def choose_dtype(setting: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """``model.dtype``, or for 'auto' float32 on CPU and the checkpoint's own type on a GPU (bfloat16 for float32)."""
    if setting != "auto":
        return DTYPES[setting]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if checkpoint_dtype == "float32" else DTYPES[checkpoint_dtype]


def instruction_sets() -> tuple[str, ...]:
    """What linear kernels can ask of this CPU, see ``LinearContext``; () on one that is no x86."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    levels = ("avx2", "avx512")
    found = levels[: levels.index(capability) + 1] if capability in levels else ()
    return (*found, "amx") if torch.cpu._is_amx_tile_supported() else found


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can still be allocated, by whoever is first: on a CPU all ranks there share it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def fair_share(free: int, place: int, comm: Comm, device: torch.device) -> int:
    """What every rank may take if those at one place share its ``free`` bytes: the least of all ranks' shares.

    All ranks ask before any of them takes something.  place: equal where memory is.  device: the communicator's."""
    asked = comm.all_gather(torch.tensor([[place, free]], device=device), 0).tolist()
    places = [there for there, _ in asked]
    return min(left // places.count(there) for there, left in asked)


def host_place(root: Path = Path("/")) -> int:
    """A number for this machine, or container where it has control groups of its own.  root: where /proc is.

    Names do not tell: virtual machines from one image have the same, containers of one pod as well."""
    try:
        machine = (root / "proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        machine = socket.gethostname()
    try:
        groups = (root / "proc/self/ns/cgroup").stat().st_ino
    except OSError:
        groups = 0
    return zlib.crc32(f"{machine} {groups}".encode())
