"""The inventory of this machine as torch finds it, for programs that must not import torch themselves.

Owns: that look-up.  Does not know: what is wanted, what to advise.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GPU:
    """One device.  capability: compute capability, e.g. '9.0'.  Memory in bytes."""

    name: str
    capability: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Torch and its devices.  cuda: version torch was built for, None for a CPU build.  threads: torch's default."""

    torch: str
    cuda: str | None
    threads: int
    gpus: tuple[GPU, ...]


def take_inventory() -> Inventory:
    """Return the inventory.  It takes a moment if there are GPUs, since their driver starts."""
    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
            gpus.append(GPU(torch.cuda.get_device_name(number), capability, *torch.cuda.mem_get_info(number)))
    return Inventory(torch.__version__, torch.version.cuda, torch.get_num_threads(), tuple(gpus))
