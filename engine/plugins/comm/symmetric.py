"""Sums in one launch: ranks read each other's parts from memory shared between the GPUs of a machine.

The sum of a decode step has some hundred kilobytes, for which NCCL's ring or tree takes several trips.  One-shot, each
rank adds all parts itself, in the order of ranks, so all have the same bits; it reads as many times the bytes as there
are ranks.  Two-shot, for some megabytes, each rank adds a share of the numbers and gives it to all: whatever its order
is, all have the bits of that rank.  Tensors that are larger, of another dtype or not contiguous go through NCCL, and so
do all if the memory is not available.

A sum that is small enough for one-shot is also added to the residual stream and normalised in the launch that sums, by
a kernel of this project (``engine/kernels/summed_norm.py``).

Legend: S bytes of the largest sum · T new tokens in the step · D model dim · R ranks
Owns: the choice of the way of a sum.  Does not know: NCCL (``torch.py``), the calling layers.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from engine.plugins.comm.torch import TorchComm, TorchCommOptions
from engine.plugins.hookspecs import CommContext, hookimpl
from engine.plugins.options import decode_options
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cuda"]}
NAME = "comm.symmetric"
DTYPES = (torch.float32, torch.bfloat16)  # supported by the kernel
ALIGNMENT = 16  # bytes per load of the kernel


class SymmetricOptions(TorchCommOptions, frozen=True):
    """Options of the plugin, with those of NCCL.

    one_shot_kb: the largest sum that each rank computes whole.
    two_shot_kb: the largest sum of which each rank computes a share, beyond that; then NCCL."""

    one_shot_kb: int = 256
    two_shot_kb: int = 8192


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


class SymmetricComm:
    """A ``Comm`` with one-launch sums, and NCCL for all else."""

    def __init__(self, library: TorchComm, share: Callable[[], SharedMemory], limit: int, device: str) -> None:
        """Set up the group, on all ranks together.

        library: for all other collectives.  share: allocates the memory, or raises.  limit: bytes of a sum there."""
        self.rank, self.size = library.rank, library.size
        self.capturable = library.capturable
        self._library = library
        self._limit = limit
        memory, problem = None, "another rank cannot"
        try:
            memory = share()
        except (RuntimeError, AttributeError, ImportError) as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        # All ranks or none: a rank that goes the other way would wait forever.
        able = library.all_reduce(torch.tensor([float(memory is not None)], device=device))
        self._memory = memory if round(float(able)) == self.size else None
        self.norms = self._memory is not None
        if self._memory is None:
            log.warning("%s: every sum goes through NCCL, as GPUs cannot read each other's memory (%s)", NAME, problem)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._memory is None or not self._fits(tensor):
            return self._library.all_reduce(tensor)
        self._memory.sum_into(tensor)
        return tensor

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        return None if self._memory is None else self._memory.add_norm(x_TD, part_TD, weight_D, eps)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._library.all_gather(tensor, dim)

    def close(self) -> None:
        self._memory = None
        self._library.close()

    def _fits(self, tensor: Tensor) -> bool:
        """Whether a tensor can be summed in shared memory; the answer is the same on every rank."""
        num_bytes = tensor.nbytes
        # A multiple of the ranks' loads: two-shot, all shares are then equal.
        whole = 0 < num_bytes <= self._limit and num_bytes % (ALIGNMENT * self.size) == 0
        return whole and tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


@hookimpl
def callboard_comm(context: CommContext) -> SymmetricComm:
    """Build the communicator for ranks with a GPU each, on one machine."""
    options = decode_options(NAME, context.options, SymmetricOptions)
    if context.device != "cuda":
        raise PluginError(f"{NAME} connects NVIDIA GPUs, not {context.device!r}; set plugins.comm=torch")
    library = TorchComm(context, options)
    one_shot_bytes = options.one_shot_kb << 10
    limit = max(one_shot_bytes, options.two_shot_kb << 10)

    def share() -> SharedMemory:
        store = PrefixStore("symmetric", library.store)
        return PeerMemory(store, context, max(limit, ALIGNMENT), one_shot_bytes)

    return SymmetricComm(library, share, limit, context.device)
