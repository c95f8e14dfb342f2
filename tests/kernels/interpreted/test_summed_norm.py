"""The sum over ranks in the launch of a norm, by processes over memory that they share: the same bits on all."""

import mmap
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import summed_norm
from engine.kernels.norm import add_norm
from engine.kernels.summed_norm import RanksMemory, memory_bytes, sum_add_norm
from tests.kernels.interpreted.planting import with_mistake
from tests.kernels.interpreted.test_layers import close, normal

EPS = 1e-5
WIDTH = 100


class Shared:
    """Zeros that processes made by ``fork`` share."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.view(dtype)


def memories(size: int) -> tuple[list[Shared], list[RanksMemory]]:
    shared = [Shared(memory_bytes(size)) for _ in range(size)]
    addresses = torch.tensor([one.tensor.data_ptr() for one in shared])
    uses = torch.zeros(size, summed_norm.SLOTS, dtype=torch.int64)
    return shared, [RanksMemory(rank, addresses, uses[rank]) for rank in range(size)]


def in_processes(size: int, work: Callable[[int], None]) -> None:
    """Run ``work(rank)`` of each rank in a process of its own, all at once."""
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            try:
                work(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_at_once_have_the_bits_of_a_sum_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    check_bits(sum_add_norm, size, dtype)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("theirs = slot_of(tl.load(addresses + rank)", "theirs = slot_of(tl.load(addresses + (rank + RANK) % RANKS)"),
        ("theirs = slot_of(tl.load(addresses + rank)", "theirs = slot_of(tl.load(addresses + RANK)"),
        ("sum_D.to(element).to(tl.float32)", "sum_D"),
        ("tl.load(part + at + d_D", "tl.load(part + d_D"),
    ],
    ids=["an order of its own", "only its own part", "rounded later", "the first row"],
)
def test_a_mistake_in_the_sum_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    planted = with_mistake(summed_norm, right, wrong, tmp_path)
    with pytest.raises(AssertionError, match="a rank has other bits"):
        for dtype in (torch.float32, torch.bfloat16):  # one hides the order, the other where a sum is rounded
            check_bits(planted.sum_add_norm, 3, dtype)


def check_bits(add: Callable[..., Tensor], size: int, dtype: torch.dtype) -> None:
    """Compare what ``add`` gives on ranks at once, over several uses of its memory, with a sum of one rank."""
    rounds = (3, 1, 1, 2, 3)
    _, ranks = memories(size)
    total = sum(rounds) * WIDTH
    results = [Shared(2 * total * dtype.itemsize) for _ in range(size)]
    weight = normal(WIDTH, seed=7, dtype=dtype)
    parts = [
        [normal(count, WIDTH, seed=9 * at + rank, dtype=dtype) for rank in range(size)]
        for at, count in enumerate(rounds)
    ]
    residuals = [normal(count, WIDTH, seed=100 + at, dtype=dtype) for at, count in enumerate(rounds)]

    def work(rank: int) -> None:
        found = []
        for at, x in enumerate(residuals):
            stream = x.clone()
            found += [add(ranks[rank], stream, parts[at][rank], weight, EPS).flatten(), stream.flatten()]
        results[rank].view(dtype).copy_(torch.cat(found))

    in_processes(size, work)
    expected = []
    for at, x in enumerate(residuals):
        stream, summed = x.clone(), torch.zeros(x.shape)
        for part in parts[at]:
            summed = summed + part.float()
        expected += [add_norm(stream, stored(summed, dtype), weight, EPS).flatten(), stream.flatten()]
    for one in results:
        assert torch.equal(one.view(dtype), torch.cat(expected)), "a rank has other bits"


def stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers as the interpreter stores them: of bfloat16 it cuts off what does not fit."""
    if dtype == torch.float32:
        return numbers
    return (numbers.view(torch.int32) & -65536).view(torch.float32).to(dtype)


def test_a_rank_may_be_one_use_ahead_and_no_more() -> None:
    """The other rank's part of the next use does not touch what is still read, and its counter is a later one."""
    check_ahead(sum_add_norm)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(use % 2) * SLOTS", "0 * SLOTS"),
        ("tl.store(uses + slot, use + 1)", "tl.store(uses + slot, use)"),
        ("tl.atomic_xchg(counter, use + 1,", "tl.atomic_xchg(counter, use + 2,"),
    ],
    ids=["one half", "uses are not counted", "a counter too high"],
)
def test_a_mistake_in_the_turns_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    planted = with_mistake(summed_norm, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check_ahead(planted.sum_add_norm)


def check_ahead(add: Callable[..., Tensor]) -> None:
    shared, ranks = memories(2)
    x, weight = normal(1, WIDTH), normal(WIDTH, seed=1)
    parts = [normal(1, WIDTH, seed=seed) for seed in (2, 3, 4)]
    for use, (theirs, mine) in enumerate([(parts[0], parts[1]), (parts[2], parts[0])]):
        for ahead in (use, use + 1):  # rank 1 has written this use's part, and the next one's
            halves = shared[1].view(torch.float32)[summed_norm.SLOTS * 2 * 2 :].view(2, summed_norm.SLOTS, -1)
            halves[ahead % 2, 0, :WIDTH] = theirs[0] if ahead == use else 1e6
        shared[0].view(torch.int64)[1] = use + 2
        stream = x.clone()
        found = add(ranks[0], stream, mine, weight, EPS)
        assert shared[0].view(torch.int64)[:2].tolist() == [use + 1, use + 2]
        assert shared[1].view(torch.int64)[0] == use + 1, "the other rank was not called"
        close(stream, x + theirs + mine)
        close(found, torch.nn.functional.rms_norm(x + theirs + mine, (WIDTH,), weight, EPS))


def test_what_does_not_fit_is_left_to_others() -> None:
    slots, width = summed_norm.SLOTS, summed_norm.SLOT_BYTES // 2
    assert summed_norm.fits(torch.empty(slots, width, dtype=torch.bfloat16))
    for shape in ((slots + 1, 8), (1, width + 1), (0, 8)):
        assert not summed_norm.fits(torch.empty(shape, dtype=torch.bfloat16))
    assert not summed_norm.fits(torch.empty(8, 4).t())
    _, ranks = memories(2)
    with pytest.raises(AssertionError, match="does not fit the slots"):
        sum_add_norm(ranks[0], torch.zeros(slots + 1, 8), torch.zeros(slots + 1, 8), torch.ones(8), EPS)
