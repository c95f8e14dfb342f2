"""Copies between a rank's rows and its snapshots, and the memory of these."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.config import Config, build_config
from engine.execution.needs import Needs
from engine.features.states.messages import StateCopies
from engine.features.states.rank import StatesRank
from engine.features.states.slots import PAGES_PER_SLOT
from engine.layers.states import RecurrentStates
from engine.messages import Step

ROWS = 3


def new_rank(
    device: str = "cpu", num_host_pages: int = 0, proposer: str = "none"
) -> tuple[StatesRank, RecurrentStates]:
    states = RecurrentStates([[(2, 3), (4,)], [(5,)]], ROWS, torch.device(device))
    states.data.copy_(torch.arange(states.data.numel()).view_as(states.data))
    sections = {"scheduler": {"max_running": ROWS}, "kv": {"num_host_pages": num_host_pages}}
    config = build_config(Config(), {**sections, "plugins": {"proposer": proposer}})
    context: Any = SimpleNamespace(config=config, comm=SimpleNamespace(rank=0))
    return StatesRank(context, states), states


def step(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> Step:
    columns = [np.array(one, dtype=np.int32).reshape(-1, 2).T.tobytes() for one in (before, after)]
    return Step(step_id=0, parts=StateCopies(before=columns[0], after=columns[1]).part())


def test_a_state_goes_to_a_snapshot_behind_a_step_and_comes_back_before_one() -> None:
    rank, states = new_rank()
    rank.prepare(2 * PAGES_PER_SLOT)
    first, second = states.data[0].clone(), states.data[1].clone()
    take: Any = step([], [(0, ROWS), (1, ROWS + 4)])
    assert rank.apply(take) is take
    rank.launched(take, None)  # type: ignore[arg-type]
    states.data.zero_()
    rank.apply(step([(ROWS, 2), (ROWS + 4, 0), (ROWS, 1)], []))
    assert torch.equal(states.data, torch.stack((second, first, first)))


def test_a_step_without_copies_changes_nothing() -> None:
    rank, states = new_rank()
    before = states.data.clone()
    plain = Step(step_id=0)
    rank.apply(plain)
    rank.launched(plain, None)  # type: ignore[arg-type]
    assert torch.equal(states.data, before)


def test_what_a_gpu_measures_is_not_counted_twice() -> None:
    rank, _ = new_rank("meta")
    assert rank.needs(Needs()).total == 0


def test_the_pool_leaves_room_for_snapshots() -> None:
    rank, states = new_rank()
    row = states.data[0].nbytes
    assert rank.page_bytes == -(-row // PAGES_PER_SLOT)
    assert rank.needs(Needs()).total == ROWS * row
    rank.prepare(2 * PAGES_PER_SLOT)
    assert rank._snapshots.nbytes == (ROWS + 2) * row
    rank.prepare(0)
    assert rank._snapshots.nbytes == 0


def test_with_a_proposer_a_row_has_room_for_a_state_that_is_set_aside() -> None:
    rank, states = new_rank(proposer="ngram")
    row = states.data[0].nbytes
    assert rank.needs(Needs()).total == 2 * ROWS * row
    rank.prepare(2 * PAGES_PER_SLOT)
    assert rank._snapshots.nbytes == (2 * ROWS + 2) * row


def test_copies_before_a_step_are_made_in_their_order_also_on_the_host() -> None:
    rank, states = new_rank(num_host_pages=PAGES_PER_SLOT + 1)
    row = states.data[0].nbytes
    assert rank.needs(Needs()).total == (ROWS + 2) * row
    rank.prepare(PAGES_PER_SLOT)
    rank.build(None, (), Needs())  # type: ignore[arg-type]
    first, second = states.data[0].clone(), states.data[1].clone()
    on_device, on_host = ROWS, ROWS + ROWS + 1
    rank.apply(step([(0, on_device), (on_device, on_host + 1), (1, on_device)], []))
    states.data.zero_()
    rank.apply(step([(on_host + 1, 0), (on_device, 2)], []))
    assert torch.equal(states.data, torch.stack((first, torch.zeros_like(first), second)))
