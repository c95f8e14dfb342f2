"""Which pages a planner lends, and when."""

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from engine.features.handover.messages import (
    NAME,
    Borrow,
    Borrowed,
    Claimed,
    Lend,
    Order,
    Report,
    order_of,
    report_message,
)
from engine.features.handover.planner import HandoverPlanner
from engine.features.handover.wish import Wish
from engine.messages import Admit, StepDone
from engine.scheduling.planner import Planner
from engine.scheduling.step_builder import StepBuilder
from engine.types.params import SamplingParams
from server.extensions.chaos.sim.mutants import instead_of
from tests.scheduling.bench import Bench, prompt_of

PROMPT = prompt_of(45)


def orders(planner: Planner) -> list[Order]:
    return [order_of(message) for message in planner.outgoing()]


def report(planner: Planner, content: Report) -> list[Order]:
    planner.received(report_message(0, content))
    return orders(planner)


def lent(found: list[Order]) -> list[int]:
    """Return how many pages are lent."""
    return [len(np.frombuffer(one.pages, dtype=np.int32)) for one in found if isinstance(one, Lend)]


def claimed_while_pages_land() -> tuple[list[int], list[int]]:
    """Return what is lent of pages that land with a step in flight, to a claim for them: at once, and behind it."""
    planner = Bench(features=[partial(HandoverPlanner, lent_share=0.5)]).planner
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    wish = Wish(peer="p", id="1").parts()
    planner.admit(Admit(request_id=1, token_ids=PROMPT.tobytes(), params=params, parts=wish))
    assert planner.next_step() is None, "it waits for pages"
    (borrow,) = (one for one in orders(planner) if isinstance(one, Borrow))
    report(planner, Borrowed(number=borrow.number, num_pages=borrow.num_pages))
    step = planner.next_step()
    assert step is not None
    orders(planner)
    claim = msgspec.structs.replace(borrow.claim, name=b"another", first_page=0)
    at_once = lent(report(planner, Claimed(claim=claim)))
    planner.complete(StepDone(rank=0, step_id=step.step_id, token_ids=np.array([5], dtype=np.int32).tobytes()))
    return at_once, lent(orders(planner))


@instead_of(HandoverPlanner, "attach")
def pages_are_lent_before_they_are_filled(
    attach: Callable[..., None], self: HandoverPlanner, step: StepBuilder
) -> None:
    attach(self, step)
    if step.notes.pop(NAME, None):
        self._filling.pop()


def test_pages_are_lent_when_they_are_filled() -> None:
    assert claimed_while_pages_land() == ([], [11])


def test_a_planner_that_does_not_wait_for_them_is_noticed() -> None:
    with pages_are_lent_before_they_are_filled.planted():
        assert claimed_while_pages_land() == ([11], [])
