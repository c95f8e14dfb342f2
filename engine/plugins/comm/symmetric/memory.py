"""Memory that the GPUs of a machine share, through torch's symmetric memory, and the sums in it.

Legend: S bytes of the largest sum · T new tokens in the step · D model dim
Owns: the memory, the kernels that sum in it.  Does not know: NCCL, which sums come here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from engine.plugins.hookspecs import CommContext

DTYPES = (torch.float32, torch.bfloat16)  # supported by the kernel
ALIGNMENT = 16  # bytes per load of the kernel


class Limits(NamedTuple):
    """The largest sums, in bytes, by each way: whole by every rank, a share by every rank, by the switch.

    by_switch: 0 if the switch between GPUs does not sum."""

    one_shot: int
    two_shot: int
    by_switch: int = 0

    @property
    def most(self) -> int:
        """The largest sum by any way."""
        return max(self)


class SharedMemory(Protocol):
    """Memory of one rank that all ranks can read."""

    def sum_into(self, tensor: Tensor) -> None:
        """Sum all ranks' ``tensor`` in place; queued on the current stream."""
        ...

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        """Do what ``NormingComm.add_norm`` does; queued on the current stream."""
        ...


class PeerMemory:
    """Symmetric memory of torch, between GPUs that can map each other's memory."""

    def __init__(self, store: Store, context: CommContext, limits: Limits) -> None:
        """Allocate the memory, on all ranks together.  Raises RuntimeError or AttributeError if it is unavailable."""
        from torch.distributed._symmetric_memory import _SymmetricMemory as Memory  # not in every build

        self._group = context.rendezvous  # unique among the groups of the process
        Memory.set_group_info(self._group, context.rank, context.size, store)
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer_S = Memory.empty_strided_p2p((max(limits.most, ALIGNMENT),), (1,), torch.uint8, device)
        Memory.rendezvous(self._buffer_S, self._group)
        self._slots = RankSlots(Memory, self._group, context, device)
        self._limits = limits
        self._one_shot: Callable[..., object] = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default
        self._two_shot: Callable[..., object] = torch.ops.symm_mem.two_shot_all_reduce_.default
        self._by_switch: Callable[..., object] = torch.ops.symm_mem.multimem_all_reduce_.default

    def sum_into(self, tensor: Tensor) -> None:
        shared = self._buffer_S[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if tensor.nbytes <= self._limits.one_shot:
            self._one_shot(shared, tensor, "sum", self._group, tensor)
            return
        add = self._two_shot if tensor.nbytes <= self._limits.two_shot else self._by_switch
        shared.copy_(tensor)  # both kernels begin with a barrier of all ranks
        add(shared, "sum", self._group)
        tensor.copy_(shared)  # before this rank's next barrier, behind which others may write here again

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        slots = self._slots
        if part_TD.nbytes > self._limits.one_shot or not slots.kernel.fits(part_TD):
            return None
        normed_TD: Tensor = slots.kernel.sum_add_norm(slots.memory, x_TD, part_TD, weight_D, eps)
        return normed_TD


def has_summing_switch() -> bool:
    """Return whether the current GPU can be in a group whose switch sums (NVLink SHARP); a trial knows more."""
    try:
        from torch.distributed._symmetric_memory import _SymmetricMemory as Memory  # not in every build

        kind: Any = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        return bool(Memory.has_multicast_support(kind, torch.cuda.current_device()))
    except (ImportError, AttributeError, RuntimeError):
        return False


class RankSlots:
    """Memory of each rank for sums in the launch of a norm.  memory: of all ranks, as this one sees it."""

    def __init__(self, library: Any, group: str, context: CommContext, device: torch.device) -> None:
        """Allocate the memory, on all ranks together.  library: torch's, which ``PeerMemory`` uses, too."""
        from engine.kernels import summed_norm  # needs triton

        self.kernel = summed_norm
        self._own = library.empty_strided_p2p((summed_norm.memory_bytes(context.size),), (1,), torch.uint8, device)
        self._own.zero_()
        self._handle = library.rendezvous(self._own, group)
        self.memory = summed_norm.RanksMemory(
            context.rank,
            torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device),
            torch.zeros(summed_norm.SLOTS, dtype=torch.int64, device=device),
        )
