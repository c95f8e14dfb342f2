"""What torch finds on this machine, for those who must not import it themselves.

Owns: that look.  Does not know: what is wanted, what to advise.
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
    """cuda: the version torch was built for, None for a CPU build.  threads: that torch uses by itself."""

    torch: str
    cuda: str | None
    threads: int
    gpus: tuple[GPU, ...]


def take_inventory() -> Inventory:
    """Look; takes a moment where there are GPUs, since their driver starts."""
    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
            gpus.append(GPU(torch.cuda.get_device_name(number), capability, *torch.cuda.mem_get_info(number)))
    return Inventory(torch.__version__, torch.version.cuda, torch.get_num_threads(), tuple(gpus))
