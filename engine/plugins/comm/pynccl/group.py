"""A rank's membership in an NCCL group: collectives are queued on the current stream, which graphs may capture.

Owns: the communicator, and the conversion of tensors to NCCL's arguments.  Does not know: layers, other streams.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Store

from engine.plugins.comm.pynccl.library import DATA_TYPES, SUM, UNIQUE_ID_BYTES, NcclError, NcclLibrary, UniqueId
from engine.plugins.comm.torch import join_parts

ID_KEY = "callboard/nccl"


def current_stream() -> int:
    """Return torch's current stream as NCCL's argument."""
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


class NcclComm:
    """A ``Comm`` on NCCL.  stream: called by every collective, so that a graph captures it on its own stream."""

    capturable = True
    exchanges = True

    def __init__(
        self, library: NcclLibrary, store: Store, rank: int, size: int, stream: Callable[[], int] = current_stream
    ) -> None:
        """Join the group; returns when all ranks have joined.  Raises NcclError."""
        self.rank, self.size = rank, size
        self._library = library
        self._stream = stream
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        library.call("ncclCommInitRank", ctypes.byref(self._comm), size, _share_id(library, store, rank), rank)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        summed = tensor.contiguous()
        place, kind = summed.data_ptr(), _kind(summed)
        self._library.call("ncclAllReduce", place, place, summed.numel(), kind, SUM, self._joined(), self._stream())
        return tensor if summed is tensor else tensor.copy_(summed)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        mine = tensor.contiguous()
        gathered = mine.new_empty((self.size, *mine.shape))
        places = mine.data_ptr(), gathered.data_ptr()
        self._library.call("ncclAllGather", *places, mine.numel(), _kind(mine), self._joined(), self._stream())
        return join_parts(gathered, dim)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        exchanged = tensor.new_empty((sum(received), *tensor.shape[1:]))
        kind, comm, stream = _kind(tensor), self._joined(), self._stream()
        self._library.call("ncclGroupStart")  # else a rank that sends would wait for one that sends, too
        for name, rows, counts in (("ncclSend", tensor, sent), ("ncclRecv", exchanged, received)):
            for rank, part in enumerate(torch.split(rows, list(counts))):
                self._library.call(name, part.data_ptr(), part.numel(), kind, rank, comm, stream)
        self._library.call("ncclGroupEnd")
        return exchanged

    def close(self) -> None:
        """Leave the group.  Queued collectives end with an error; ncclCommDestroy would wait for them."""
        comm, self._comm = self._comm, None
        if comm is not None:
            self._library.call("ncclCommAbort", comm)

    def _joined(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise NcclError(f"rank {self.rank} has left its group")
        return self._comm


def _share_id(library: NcclLibrary, store: Store, rank: int) -> UniqueId:
    """Return the group's id: rank 0 makes it, the others wait for it in the store."""
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
