"""Small sums in one launch: every rank reads all ranks' parts from memory that the GPUs of a machine map of each other.

A sum of a decode step is some hundred kilobytes, and NCCL's ring or tree takes several trips for it.  One-shot, each
rank adds all parts itself, in the order of ranks, so all have the same bits.  What is larger, of another dtype or not
contiguous goes through NCCL, and so does everything where the memory cannot be had.

Legend: S bytes that a sum may have
Owns: which sums go which way.  Does not know: NCCL (``torch.py``), which layers call it.
"""

import logging
from collections.abc import Callable
from typing import Protocol

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
DTYPES = (torch.float32, torch.bfloat16)  # that the kernel adds
ALIGNMENT = 16  # bytes that it loads at a time


class SymmetricOptions(TorchCommOptions, frozen=True):
    """one_shot_kb: the largest sum that is done in one launch; beyond it NCCL moves less.  The others: of NCCL."""

    one_shot_kb: int = 512


class SharedMemory(Protocol):
    """Memory of one rank that all ranks can read."""

    def sum_into(self, tensor: Tensor) -> None:
        """Sum all ranks' ``tensor`` in place; queued on the current stream."""
        ...


class PeerMemory:
    """See ``SharedMemory``: torch's, between GPUs that can map each other's."""

    def __init__(self, store: Store, context: CommContext, num_bytes: int) -> None:
        """All ranks together.  Raises RuntimeError or AttributeError where there is no such memory."""
        from torch.distributed._symmetric_memory import _SymmetricMemory as Memory  # not in every build

        self._group = context.rendezvous  # names this group and no other of the process
        Memory.set_group_info(self._group, context.rank, context.size, store)
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer_S = Memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        Memory.rendezvous(self._buffer_S, self._group)
        self._sum = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default

    def sum_into(self, tensor: Tensor) -> None:
        shared = self._buffer_S[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._sum(shared, tensor, "sum", self._group, tensor)


class SymmetricComm:
    """See ``Comm``."""

    def __init__(self, library: TorchComm, share: Callable[[], SharedMemory], limit: int, device: str) -> None:
        """library: for what is not done in one launch.  share: makes the memory, or raises.  limit: bytes."""
        self.rank, self.size = library.rank, library.size
        self.capturable = library.capturable
        self._library = library
        self._limit = limit
        memory, problem = None, "another rank cannot"
        try:
            memory = share()
        except (RuntimeError, AttributeError, ImportError) as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        # All or none: a rank that goes the other way waits for ever.
        able = library.all_reduce(torch.tensor([float(memory is not None)], device=device))
        self._memory = memory if round(float(able)) == self.size else None
        if self._memory is None:
            log.warning("%s: every sum goes through NCCL: GPUs cannot read each other's memory (%s)", NAME, problem)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._memory is None or not self._fits(tensor):
            return self._library.all_reduce(tensor)
        self._memory.sum_into(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._library.all_gather(tensor, dim)

    def close(self) -> None:
        self._memory = None
        self._library.close()

    def _fits(self, tensor: Tensor) -> bool:
        """By what is the same on every rank."""
        num_bytes = tensor.nbytes
        whole = 0 < num_bytes <= self._limit and num_bytes % ALIGNMENT == 0
        return whole and tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


@hookimpl
def callboard_comm(context: CommContext) -> SymmetricComm:
    """Ranks with a GPU each, on one machine."""
    options = decode_options(NAME, context.options, SymmetricOptions)
    if context.device != "cuda":
        raise PluginError(f"{NAME} connects NVIDIA GPUs, not {context.device!r}; set plugins.comm=torch")
    library = TorchComm(context, options)
    limit = options.one_shot_kb << 10

    def share() -> SharedMemory:
        return PeerMemory(PrefixStore("symmetric", library.store), context, max(limit, ALIGNMENT))

    return SymmetricComm(library, share, limit, context.device)
