"""The page allocator against a set: whatever is taken and given back, every page has one owner."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.pages import PageAllocator

NUM_PAGES = 24


class PagesMachine(RuleBasedStateMachine):
    """free: what a naive model thinks nobody holds.  held: who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.free = set(range(NUM_PAGES))
        self.held: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        got = self.pages.allocate(data.draw(st.integers(0, len(self.free)))).tolist()
        assert len(set(got)) == len(got)
        assert set(got) <= self.free, "a page was handed out twice"
        self.free -= set(got)
        self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.integers(0, len(self.held) - 1))
        back = data.draw(st.permutations(self.held[owner]))[: data.draw(st.integers(0, len(self.held[owner])))]
        self.pages.free(np.array(back, dtype=np.int32))
        self.held[owner] = [page for page in self.held[owner] if page not in back]
        self.free |= set(back)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_pages_cannot_be_freed(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(AssertionError, match="freed twice"):
            self.pages.free(np.array([page], dtype=np.int32))

    @rule()
    def more_than_there_is_cannot_be_had(self) -> None:
        with pytest.raises(AssertionError, match="asked for"):
            self.pages.allocate(len(self.free) + 1)

    @invariant()
    def books_agree(self) -> None:
        self.pages.check()
        assert self.pages.num_free == len(self.free)
        assert self.pages.num_held == NUM_PAGES - len(self.free)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_fresh_pool_hands_out_neighbours() -> None:
    assert PageAllocator(8).allocate(3).tolist() == [0, 1, 2]


def test_a_run_that_comes_back_is_handed_out_as_the_same_run() -> None:
    pages = PageAllocator(16)
    run = pages.allocate(5)
    pages.allocate(2)
    pages.free(run)
    assert pages.allocate(5).tolist() == run.tolist()
