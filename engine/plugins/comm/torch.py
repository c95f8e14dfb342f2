"""Communication by torch's own libraries: NCCL between GPUs, Gloo between CPUs.

The process group is an object of its own, not torch's default one of the process, so the ranks of a group may also be
threads, and a group can be dropped and made again.

Owns: the group, and the conversion of a gather along any dimension to the library's.
Does not know: the calling layers.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from engine.plugins.hookspecs import CommContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.rendezvous import local_address, open_store
from engine.types.errors import PluginError

CALLBOARD_PLUGIN = {"api": 1}
NAME = "comm.torch"


class TorchCommOptions(Options, frozen=True):
    """Options of the plugin.

    timeout_s: how long a rank waits for the others, at the start and in a collective.
    interface: IP address that Gloo binds to; 'auto' for this machine's address on the route to the rendezvous, loopback
    if that is a file."""

    timeout_s: float = 600.0
    interface: str = "auto"


class TorchComm:
    """A ``Comm`` on torch's process groups.  With NCCL collectives are queued on the current stream without waiting.

    store: the one that the ranks met in."""

    exchanges = True

    def __init__(self, context: CommContext, options: TorchCommOptions) -> None:
        self.rank, self.size = context.rank, context.size
        self.capturable = context.device == "cuda"
        self.store = open_store(NAME, context.rendezvous, self.rank, self.size, options.timeout_s)
        try:
            self._group: Any = self._make_group(self.store, context, options)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PluginError(f"{NAME}: rank {self.rank} of {self.size} could not connect: {reason}") from error

    def _make_group(self, store: dist.Store, context: CommContext, options: TorchCommOptions) -> Any:
        timeout = timedelta(seconds=options.timeout_s)
        if context.device == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return dist.ProcessGroupNCCL(store, self.rank, self.size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        address = options.interface
        if address == "auto":
            address = local_address(context.rendezvous)
        create = dist.ProcessGroupGloo.create_device
        gloo._devices = [create(hostname=address) if address else dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, self.rank, self.size, gloo)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        summed = tensor.contiguous()
        options = AllreduceOptions()
        options.asyncOp = False
        _wait(self._open_group().allreduce([summed], options))
        return tensor if summed is tensor else tensor.copy_(summed)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._open_group()._allgather_base(gathered.flatten(0, 1), tensor.contiguous(), options))
        return join_parts(gathered, dim)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        exchanged = tensor.new_empty((sum(received), *tensor.shape[1:]))
        options = AllToAllOptions()
        options.asyncOp = False
        _wait(self._open_group().alltoall_base(exchanged, tensor, list(received), list(sent), options))
        return exchanged

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # shutdown() would wait for queued collectives, and so for ranks that may be gone

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError(f"{NAME}: rank {self.rank} has left its group")
        return self._group


def _wait(work: dist.Work | None) -> None:
    """Wait for Gloo; NCCL has queued the collective on the current stream and needs no wait."""
    if work is not None:
        work.wait()


def join_parts(gathered: Tensor, dim: int) -> Tensor:
    """Return gathered parts, [ranks, ...], concatenated along ``dim`` of a part."""
    dim %= gathered.dim() - 1
    if dim == 0:
        return gathered.flatten(0, 1)
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


@hookimpl
def callboard_comm(context: CommContext) -> TorchComm:
    """Build the communicator for any number of ranks: threads, processes or machines."""
    options = decode_options(NAME, context.options, TorchCommOptions)
    if not dist.is_available() or (context.device == "cuda" and not dist.is_nccl_available()):
        raise PluginError(f"{NAME}: this build of torch {torch.__version__} has no NCCL; install torch for CUDA")
    return TorchComm(context, options)
