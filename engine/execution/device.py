"""The device a rank runs on: which one, with how many threads, in which dtype, and how much memory it has left.

Owns: the choice and its reasons.  Does not know: models, pools.
"""

import logging
import os

import torch

from engine.config import DeviceSection
from engine.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_CPU_POOL_BYTES = 4 << 30


def choose_device(section: DeviceSection, rank: int) -> torch.device:
    """The torch device of a rank; sets the thread count on CPU.  Raises ConfigError if there is no GPU to take."""
    kind = section.kind
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        log.info("device: %s (%s)", kind, "a GPU is present" if kind == "cuda" else "no GPU is present")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device.kind=cuda: torch sees no GPU here; install torch for CUDA or use device.kind=cpu")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(section.threads or len(os.sched_getaffinity(0)))
    return torch.device("cpu")


def choose_dtype(setting: str, device: torch.device, checkpoint_dtype: str) -> torch.dtype:
    """``model.dtype``, or for 'auto' float32 on CPU and the checkpoint's own type on a GPU (bfloat16 for float32)."""
    if setting != "auto":
        return DTYPES[setting]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if checkpoint_dtype == "float32" else DTYPES[checkpoint_dtype]


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated; on CPU capped, since other programs live there too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), MAX_CPU_POOL_BYTES)
