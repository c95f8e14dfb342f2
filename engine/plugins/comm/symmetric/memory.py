"""Memory that the GPUs of a machine share, through torch's symmetric memory, and the sums in it.

Legend: S bytes of the largest sum · T new tokens in the step · D model dim
Owns: the memory, the kernels that sum in it.  Does not know: NCCL, which sums come here.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from engine.plugins.hookspecs import CommContext

DTYPES = (torch.float32, torch.bfloat16)  # supported by the kernel
ALIGNMENT = 16  # bytes per load of the kernel


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

    def __init__(self, store: Store, context: CommContext, num_bytes: int, one_shot_bytes: int) -> None:
        """Allocate the memory, on all ranks together.  Raises RuntimeError or AttributeError if it is unavailable.

        one_shot_bytes: the largest sum that each rank computes whole."""
        from torch.distributed._symmetric_memory import _SymmetricMemory as Memory  # not in every build

        self._group = context.rendezvous  # unique among the groups of the process
        Memory.set_group_info(self._group, context.rank, context.size, store)
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer_S = Memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        Memory.rendezvous(self._buffer_S, self._group)
        self._slots = RankSlots(Memory, self._group, context, device)
        self._one_shot_bytes = one_shot_bytes
        self._one_shot: Callable[..., object] = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default
        self._two_shot: Callable[..., object] = torch.ops.symm_mem.two_shot_all_reduce_.default

    def sum_into(self, tensor: Tensor) -> None:
        shared = self._buffer_S[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if tensor.nbytes <= self._one_shot_bytes:
            self._one_shot(shared, tensor, "sum", self._group, tensor)
            return
        shared.copy_(tensor)  # the kernel begins with a barrier of all ranks
        self._two_shot(shared, "sum", self._group)
        tensor.copy_(shared)  # before this rank's next barrier, behind which others may write here again

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        slots = self._slots
        if part_TD.nbytes > self._one_shot_bytes or not slots.kernel.fits(part_TD):
            return None
        normed_TD: Tensor = slots.kernel.sum_add_norm(slots.memory, x_TD, part_TD, weight_D, eps)
        return normed_TD


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
