"""The sum over ranks with whole experts: the bits of a sum in their order, and only results that there are are sent."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from engine.checkpoints.shape import ExpertsShape, RouterShape
from engine.graphs.comm import BreakingComm
from engine.layers.comm import Comm
from engine.layers.exchange import exchanged_sum
from engine.layers.experts import Experts
from engine.layers.ordered_comm import OrderedComm
from engine.plugins.comm.local import LocalComm
from engine.plugins.testing.threads import ThreadComm
from tests.comm.groups import at_once

Rank = TypeVar("Rank", bound=ThreadComm)
WIDTH, NUM_CHOSEN = 8, 2


def parts_and_owners(size: int, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return what each rank has, [R, T, D], zeros where it owns none of a token's experts, and owners, [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    owners = torch.randint(size, (num_tokens, NUM_CHOSEN), generator=generator)
    has = torch.zeros(size, num_tokens, 1)
    has[owners, torch.arange(num_tokens)[:, None]] = 1
    return torch.randn(size, num_tokens, WIDTH, generator=generator) * has, owners


class CountingComm(ThreadComm):
    """A rank that counts the rows that it sends to others."""

    rows = 0

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.rows += len(tensor) - sent[self.rank]
        assert tensor.any(1).all(), "a row of zeros is sent"
        return super().all_to_all(tensor, sent, received)


def group_of(kind: type[Rank], size: int) -> list[Rank]:
    posted: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    return [kind(rank, posted, barrier) for rank in range(size)]


def sums(parts: Tensor, owners: Tensor, kind: type[CountingComm] = CountingComm) -> list[tuple[Tensor, int]]:
    """Return each rank's sum, and the rows that it sent."""
    ranks = group_of(kind, len(parts))
    found = at_once(len(parts), lambda rank: exchanged_sum(ranks[rank], parts[rank].clone(), owners))
    return [(one, rank.rows) for one, rank in zip(found, ranks, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 33])
def test_all_ranks_have_the_bits_of_the_sum_in_their_order(size: int, num_tokens: int) -> None:
    parts, owners = parts_and_owners(size, num_tokens)
    expected = torch.zeros(num_tokens, WIDTH)
    for part in parts:
        expected = expected + part
    for found, _ in sums(parts, owners):
        assert torch.equal(found, expected)


def test_each_result_is_sent_once_to_one_rank_and_nothing_else_is() -> None:
    size, num_tokens = 4, 40
    parts, owners = parts_and_owners(size, num_tokens)
    rows = sum(sent for _, sent in sums(parts, owners))
    homes = (torch.arange(num_tokens) // (num_tokens // size)).tolist()
    assert rows == sum(len({*of_token} - {home}) for of_token, home in zip(owners.tolist(), homes, strict=True))


class SwappedRows(CountingComm):
    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return super().all_to_all(tensor, sent, received).flip(0)


class ForgottenRank(CountingComm):
    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        rows = super().all_to_all(tensor, sent, received)
        rows[: received[0]] = 0
        return rows


class OldHomes(CountingComm):
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return super().all_gather(tensor, dim).roll(1, 0)


@pytest.mark.parametrize("mistake", [SwappedRows, ForgottenRank, OldHomes])
def test_the_comparison_finds_a_mistake_of_the_exchange(mistake: type[CountingComm]) -> None:
    parts, owners = parts_and_owners(2, 33)
    assert all(not torch.equal(found, parts.sum(0)) for found, _ in sums(parts, owners, mistake))


class NamedCalls(ThreadComm):
    """A rank that lists its collectives by name."""

    def __init__(self, rank: int, posted: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(rank, posted, barrier)
        self.names: list[str] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.names.append("all_reduce")
        return super().all_reduce(tensor)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.names.append("all_to_all")
        return super().all_to_all(tensor, sent, received)


class KnownRecorder:
    """A recorder that records or not, and runs everything at once."""

    num_tokens = 7

    def __init__(self, recording: bool) -> None:
        self.recording = recording

    def run(self, kind: str, body: Callable[[], None]) -> None:
        body()

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor


def layer_of(comm: Comm) -> Experts:
    """Return a layer whose experts have the same weights however many ranks divide them."""
    shape = ExpertsShape(
        num_experts=5,
        num_chosen=NUM_CHOSEN,
        expert_size=16,
        activation="silu",
        router=RouterShape(),
        divided=True,
        exchanged=True,
    )
    layer = Experts(shape, WIDTH, comm, torch.device("cpu"), torch.float32)
    layer.router.linear.weight.copy_(normal(5, WIDTH, seed=9))
    for number, expert in enumerate(layer.experts, layer.first):
        for linear in expert.linears:
            linear.weight = normal(*linear.weight.shape, seed=number)
    return layer


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda comm: comm, "all_to_all"),
        (OrderedComm, "all_to_all"),
        (lambda comm: BreakingComm(comm, KnownRecorder(False)), "all_to_all"),
        (lambda comm: BreakingComm(comm, KnownRecorder(True)), "all_reduce"),
    ],
    ids=["a library", "ordered", "eager", "recorded"],
)
def test_a_layer_exchanges_unless_its_run_is_recorded(wrap: Callable[[NamedCalls], Comm], name: str) -> None:
    x = normal(7, WIDTH, seed=2)
    alone = layer_of(LocalComm())(x, None)
    ranks = group_of(NamedCalls, 2)
    for found in at_once(2, lambda rank: layer_of(wrap(ranks[rank]))(x, None)):
        torch.testing.assert_close(found, alone)
    assert [rank.names for rank in ranks] == [[name]] * 2
