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
from engine.kernels.levels import levels_here
from engine.layers.comm import Comm
from engine.settings.sections import DeviceSection
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL_MODEL_BYTES = 64 << 20
TINY_MODEL_BYTES = 4 << 20  # below this one thread is best on every machine


def choose_device(section: DeviceSection, rank: int) -> torch.device:
    """Return the torch device of a rank.  Raises ConfigError if there is no GPU, or one that torch cannot use."""
    kind, present = section.kind, torch.cuda.is_available()
    if kind != "cpu" and not present and torch.version.cuda and gpu_bytes():
        driver = f"CUDA {driver_cuda()}"
        raise ConfigError(
            f"device.kind={kind}: torch {torch.__version__}, made for CUDA {torch.version.cuda}, cannot use this "
            f"machine's GPU: its driver supports {driver}; upgrade the driver, install a torch for {driver} "
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
    """Set ``device.threads`` threads, or for 0 one for a small model, else every core.  Call it on the model's thread.

    Return the numbers that are worth measuring when the model is loaded; () if the number is final.

    A small model's operations are so short that threads wait for each other longer than they work, and when another
    program takes a core they wait for its time slice at every operation: next to two busy processes on two cores
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
    """Return powers of two up to the number of physical cores that this process may run on, and that number.

    OMP_NUM_THREADS, if set, is a limit.  root: the directory that has /sys."""
    allowed = os.sched_getaffinity(0)
    siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed)
    cores = len({path.read_text() if path.exists() else path for path in siblings})
    asked = os.environ.get("OMP_NUM_THREADS", "")
    most = min(cores, max(1, int(asked))) if asked.isdecimal() else cores
    return tuple(sorted({most, *(1 << bit for bit in range(most.bit_length()))}))


def choose_dtype(setting: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """Return ``model.dtype``; for 'auto' float32 on CPU, and on a GPU the checkpoint's type (bfloat16 for float32)."""
    if setting != "auto":
        return DTYPES[setting]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if checkpoint_dtype == "float32" else DTYPES[checkpoint_dtype]


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this CPU, as ``LinearContext`` has them; () on one that has none of these."""
    names = {level.name for level in levels_here(torch.backends.cpu.get_cpu_capability())}
    found = tuple(one for one in ("avx2", "avx512") if one in names)
    if "neon_dotprod" in names:
        return ("neon",)
    return (*found, "amx") if torch.cpu._is_amx_tile_supported() else found


def free_bytes(device: torch.device) -> int:
    """Return the memory of the device that can still be allocated.  On a CPU all ranks there share it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def fair_share(free: int, place: int, comm: Comm, device: torch.device) -> int:
    """Return the memory that every rank may take if ranks at one place share its ``free`` bytes: the smallest share.

    Every rank calls it before any of them allocates.  place: equal on ranks that share memory.
    device: the communicator's."""
    asked = comm.all_gather(torch.tensor([[place, free]], device=device), 0).tolist()
    places = [there for there, _ in asked]
    return min(left // places.count(there) for there, left in asked)


def host_place(root: Path = Path("/")) -> int:
    """Return a number for this machine, or for a container with control groups of its own.

    root: the directory that has /proc.
    Host names do not serve: virtual machines from one image have the same, and so have containers of one pod."""
    try:
        machine = (root / "proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        machine = socket.gethostname()
    try:
        groups = (root / "proc/self/ns/cgroup").stat().st_ino
    except OSError:
        groups = 0
    return zlib.crc32(f"{machine} {groups}".encode())
