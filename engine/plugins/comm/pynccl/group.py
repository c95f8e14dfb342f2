"""A rank's place in an NCCL group: collectives queued on the current stream, which graphs may capture.

Owns: the communicator, and what of a tensor NCCL is given.  Does not know: who calls, streams of others.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Store

from engine.plugins.comm.pynccl.library import DATA_TYPES, SUM, UNIQUE_ID_BYTES, NcclError, NcclLibrary, UniqueId
from engine.plugins.comm.torch import join_parts

ID_KEY = "callboard/nccl"


def current_stream() -> int:
    """The stream that torch works on now, as NCCL takes it."""
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


class NcclComm:
    """See ``Comm``.  stream: asked at every call, so that a collective is captured where a graph is."""

    capturable = True

    def __init__(
        self, library: NcclLibrary, store: Store, rank: int, size: int, stream: Callable[[], int] = current_stream
    ) -> None:
        """Join the group; returns when all ranks have.  Raises NcclError."""
        self.rank, self.size = rank, size
        self._library = library
        self._stream = stream
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        library.call("ncclCommInitRank", ctypes.byref(self._comm), size, _share_id(library, store, rank), rank)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``Comm``."""
        summed = tensor.contiguous()
        place, kind = summed.data_ptr(), _kind(summed)
        self._library.call("ncclAllReduce", place, place, summed.numel(), kind, SUM, self._joined(), self._stream())
        return tensor if summed is tensor else tensor.copy_(summed)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """See ``Comm``."""
        mine = tensor.contiguous()
        gathered = mine.new_empty((self.size, *mine.shape))
        places = mine.data_ptr(), gathered.data_ptr()
        self._library.call("ncclAllGather", *places, mine.numel(), _kind(mine), self._joined(), self._stream())
        return join_parts(gathered, dim)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, of which each keeps its part of dimension 0, which ``size`` must divide."""
        whole = tensor.contiguous()
        mine = whole.new_empty((len(whole) // self.size, *whole.shape[1:]))
        if len(mine) * self.size != len(whole):
            raise NcclError(f"reduce_scatter of {len(whole)} rows over {self.size} ranks: it does not divide")
        places = whole.data_ptr(), mine.data_ptr()
        self._library.call("ncclReduceScatter", *places, mine.numel(), _kind(mine), SUM, self._joined(), self._stream())
        return mine

    def barrier(self, device: torch.device) -> None:
        """Return when every rank has called it and the device has come as far.  Waits on the host."""
        arrived = self.all_reduce(torch.ones(1, dtype=torch.int32, device=device))
        if (count := int(arrived.item())) != self.size:
            raise NcclError(f"barrier: {count} ranks of {self.size} have come")

    def check(self) -> None:
        """Raise NcclError if a collective that was queued has failed since."""
        state = ctypes.c_int()
        self._library.call("ncclCommGetAsyncError", self._joined(), ctypes.byref(state))
        if state.value:
            raise NcclError(f"rank {self.rank} of {self.size}: {self._library.describe(state.value)}")

    def close(self) -> None:
        """See ``Comm``.  What is queued ends with an error; ncclCommDestroy would wait for it."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self._library.call("ncclCommAbort", comm)

    def _joined(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise NcclError(f"rank {self.rank} has left its group")
        return self._comm


def _share_id(library: NcclLibrary, store: Store, rank: int) -> UniqueId:
    """Rank 0 makes the group's id, the others wait for it in the store."""
    shared = UniqueId()
    if rank == 0:
        library.call("ncclGetUniqueId", ctypes.byref(shared))
        store.set(ID_KEY, bytes(shared).hex())
    else:
        received = bytes.fromhex(store.get(ID_KEY).decode())
        if len(received) != UNIQUE_ID_BYTES:
            raise NcclError(f"the group's id has {len(received)} bytes, expected {UNIQUE_ID_BYTES}")
        ctypes.memmove(ctypes.byref(shared), received, UNIQUE_ID_BYTES)
    return shared


def _kind(tensor: Tensor) -> int:
    kind = DATA_TYPES.get(tensor.dtype)
    if kind is None:
        raise NcclError(f"NCCL cannot send {tensor.dtype}")
    return kind
