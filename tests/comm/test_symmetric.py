"""``comm.symmetric`` with memory that threads share in place of GPUs': which sums go there, and where none does."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.plugins.comm.symmetric import PeerMemory, SymmetricComm, callboard_comm
from engine.plugins.comm.symmetric.memory import Limits
from engine.plugins.comm.torch import TorchComm, TorchCommOptions
from engine.plugins.hookspecs import CommContext
from engine.plugins.testing.comm import check_comm
from engine.types.errors import PluginError
from tests.comm.groups import at_once

LIMIT = 256
NewUrl = Callable[[], str]


class ThreadMemory:
    """Every rank's part is a tensor that all threads see.  sums: sizes in bytes."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.sums: list[int] = []
        self._parts = parts
        self._barrier = barrier

    def sum_into(self, tensor: Tensor) -> None:
        self.sums.append(tensor.nbytes)
        self._parts[self.rank] = tensor.clone()
        self._barrier.wait(60)
        tensor.copy_(sum(self._parts[1:], self._parts[0]))
        self._barrier.wait(60)


@pytest.fixture
def new_url(tmp_path: Path) -> NewUrl:
    urls = (f"file://{tmp_path}/group{number}" for number in range(100))
    return lambda: next(urls)


def group(url: str, size: int, unable: int = -1) -> tuple[list[SymmetricComm], list[ThreadMemory]]:
    parts, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    memories = [ThreadMemory(rank, parts, barrier) for rank in range(size)]

    def share(rank: int) -> ThreadMemory:
        if rank == unable:
            raise RuntimeError("no peer access between devices 0 and 1")
        return memories[rank]

    def build(rank: int) -> SymmetricComm:
        library = TorchComm(CommContext(rank, size, "cpu", url), TorchCommOptions())
        return SymmetricComm(library, lambda limits: share(rank), Limits(LIMIT, LIMIT), "cpu")

    return at_once(size, build), memories


def test_the_whole_contract(new_url: NewUrl) -> None:
    check_comm(lambda size: group(new_url(), size)[0], sizes=(1, 2, 3))


@pytest.mark.parametrize(
    ("tensor", "one_shot"),
    [
        (torch.ones(8), True),
        (torch.ones(LIMIT // 4), True),
        (torch.ones(LIMIT // 2, dtype=torch.bfloat16), True),
        (torch.ones(LIMIT // 4 + 8), False),  # too large
        (torch.ones(3), False),  # no whole load
        (torch.ones(12), False),  # no equal shares of whole loads
        (torch.ones(8, dtype=torch.float16), False),
        (torch.ones(4, dtype=torch.int64), False),
        (torch.ones(4, 8).t(), False),
        (torch.ones(0), False),
    ],
    ids=lambda one: f"{tuple(one.shape)} {one.dtype}" if isinstance(one, Tensor) else None,
)
def test_small_sums_go_through_shared_memory_and_others_through_the_library(
    new_url: NewUrl, tensor: Tensor, one_shot: bool
) -> None:
    ranks, memories = group(new_url(), 2)
    own = [tensor.clone(memory_format=torch.preserve_format) for _ in range(2)]
    sums = at_once(2, lambda rank: ranks[rank].all_reduce(own[rank]))
    assert all(sums[rank] is own[rank] and (own[rank] == 2).all() for rank in range(2))
    assert [memory.sums for memory in memories] == [[tensor.nbytes] * one_shot] * 2


class KernelModels:
    """Models of torch's kernels over buffers that all threads see, in the kernels' order of adding, float32 inside.

    The one-shot kernel adds in the order of ranks.  The two-shot kernel of a rank adds its share, beginning with its
    own part, and writes it to every buffer.  The switch does the same in an order of its own.  ways: that were used."""

    def __init__(self, size: int, num_bytes: int) -> None:
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(size)]
        self.barrier = threading.Barrier(size)
        self.size = size
        self.ways: set[str] = set()

    def memory(self, rank: int, limits: Limits) -> PeerMemory:
        made = PeerMemory.__new__(PeerMemory)
        parts: dict[str, object] = {
            "_group": "group",
            "_buffer_S": self.buffers[rank],
            "_limits": limits,
            "_one_shot": lambda *given: self.one_shot(*given),
            "_two_shot": lambda *given: self.in_shares(rank, range(self.size), *given),
            "_by_switch": lambda *given: self.in_shares(rank, (1, 0, 2), *given),
        }
        for name, value in parts.items():
            setattr(made, name, value)
        return made

    def seen(self, like: Tensor) -> list[Tensor]:
        return [one[: like.nbytes].view(like.dtype) for one in self.buffers]

    def one_shot(self, shared: Tensor, local: Tensor, op: str, group: str, out: Tensor) -> None:
        shared.copy_(local)
        self.barrier.wait(60)
        out.copy_(added(self.seen(shared)).view(out.shape))
        self.barrier.wait(60)

    def in_shares(self, rank: int, steps: Sequence[int], shared: Tensor, op: str, group: str) -> None:
        self.ways.add(f"steps {(*steps,)}")
        self.barrier.wait(60)
        share = slice(rank * shared.numel() // self.size, (rank + 1) * shared.numel() // self.size)
        ranks = [(rank + step) % self.size for step in steps]
        total = added([self.seen(shared)[one][share] for one in ranks])
        self.barrier.wait(60)
        for one in self.seen(shared):
            one[share] = total
        self.barrier.wait(60)


def added(parts: list[Tensor]) -> Tensor:
    """Return the sum in this order, rounded once."""
    total = parts[0].float()
    for one in parts[1:]:
        total = total + one.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize(
    ("num_bytes", "ways"),
    [
        (96, set()),
        (3 * LIMIT, {"steps (0, 1, 2)"}),
        (6 * LIMIT, {"steps (0, 1, 2)"}),
        (12 * LIMIT, {"steps (1, 0, 2)"}),
    ],
)
def test_every_kernel_gives_all_ranks_the_same_bits(new_url: NewUrl, num_bytes: int, ways: set[str]) -> None:
    size, url = 3, new_url()
    kernels, limits = KernelModels(size, 16 * LIMIT), Limits(LIMIT, 8 * LIMIT, 16 * LIMIT)
    trial: Any = SimpleNamespace(known="")

    def build(rank: int) -> SymmetricComm:
        library = TorchComm(CommContext(rank, size, "cpu", url), TorchCommOptions())
        return SymmetricComm(library, partial(kernels.memory, rank), limits, "cpu", None, trial)

    ranks = at_once(size, build)
    for _ in range(3):  # a call finds what the one before has left
        own = torch.randn(size, num_bytes // 2).bfloat16()
        exact = own.double().sum(0)
        sums = at_once(size, lambda rank, own=own: ranks[rank].all_reduce(own[rank].clone().view(2, -1)).flatten())
        assert all(torch.equal(one, sums[0]) for one in sums)
        torch.testing.assert_close(sums[0].double(), exact, rtol=0.02, atol=0.02)
    assert kernels.ways == ways


def test_where_one_rank_has_no_such_memory_none_uses_it(new_url: NewUrl, caplog: pytest.LogCaptureFixture) -> None:
    ranks, memories = group(new_url(), 2, unable=1)
    assert at_once(2, lambda rank: ranks[rank].all_reduce(torch.ones(4)).tolist()) == [[2.0] * 4] * 2
    assert [memory.sums for memory in memories] == [[], []]
    assert any("no peer access between devices 0 and 1" in message for message in caplog.messages)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(PluginError, match=r"connects NVIDIA GPUs, not 'cpu'; set plugins.comm=torch"):
        callboard_comm(CommContext(0, 2, "cpu", "file:///tmp/nowhere"))


def test_torch_has_the_memory_and_the_sum_as_they_are_called() -> None:
    memory = pytest.importorskip("torch.distributed._symmetric_memory")._SymmetricMemory
    assert "(arg0: str, arg1" in memory.set_group_info.__doc__
    assert "size" in memory.empty_strided_p2p.__doc__
    assert "rendezvous(" in memory.rendezvous.__doc__
    schema = str(torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema)
    assert schema.endswith(
        "(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(a!) out) -> Tensor(a!)"
    )
    for summed in (torch.ops.symm_mem.two_shot_all_reduce_, torch.ops.symm_mem.multimem_all_reduce_):
        schema = str(summed.default._schema)
        assert schema.endswith("(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)")
    assert "has_multicast_support(arg0: c10::DeviceType" in memory.has_multicast_support.__doc__
    assert torch.autograd.DeviceType.CUDA
