"""Rows with a grammar: their masks, what they have seen, and that they change nothing for others."""

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.features.grammar.grammars import GrammarCache
from engine.sampling.constraints import BUDGET_TOKENS, LATE_S, Constraints, Masks
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.text.grammar import GrammarFailure, Mask
from engine.types.errors import RequestError
from engine.types.params import Grammar, SamplingParams
from tests.pace import far

VOCAB = 70
CPU = torch.device("cpu")


class CountingMatcher:
    """Allows token n after n tokens; its grammar's source says after how many it fails."""

    def __init__(self, fails_after: int) -> None:
        self.seen: list[int] = []
        self._fails_after = fails_after

    def consume(self, token_id: int) -> None:
        self.seen.append(token_id)

    def fill(self, mask: Mask) -> None:
        if len(self.seen) >= self._fails_after:
            raise GrammarFailure("too far")
        mask[:] = 0
        mask.view(np.uint32)[len(self.seen) // 32] = 1 << len(self.seen) % 32


class CountingEngine:
    """A grammar that compiles to itself.  made: every matcher."""

    num_bytes = 1

    def __init__(self) -> None:
        self.made: list[CountingMatcher] = []
        self._fails_after = 0

    def compile(self, grammar: Grammar) -> "CountingEngine":
        if grammar.source == "wrong":
            raise RequestError("wrong")
        self._fails_after = int(grammar.source)
        return self

    def matcher(self) -> CountingMatcher:
        self.made.append(CountingMatcher(self._fails_after))
        return self.made[-1]


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def constraints(engine: CountingEngine) -> Constraints:
    return Constraints(GrammarCache(lambda: engine), VOCAB, CPU)


def follows(source: str = "99") -> SamplingParams:
    return SamplingParams(grammar=Grammar("regex", source))


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def allowed(masks: Masks) -> list[list[int]]:
    logits = torch.zeros(8, VOCAB)
    masks.apply(logits)
    return [torch.isfinite(logits[at]).nonzero().flatten().tolist() for at in masks.at_R.tolist()]


def known(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def test_rows_without_a_grammar_cost_nothing(constraints: Constraints) -> None:
    constraints.admit(0, SamplingParams(), known(1), 1)
    assert constraints.begin(rows(0)) is None


def test_masks_are_of_the_rows_that_have_one(constraints: Constraints) -> None:
    constraints.admit(4, follows(), known(7, 7), 2)
    constraints.admit(2, SamplingParams(), known(7), 1)
    constraints.admit(5, follows(), known(7, 7, 50, 51), 2)
    assert constraints.begin(rows(2)) is None
    pending = constraints.begin(rows(5, 2, 4))
    assert pending is not None
    masks = pending.result()
    assert masks.at_R.tolist() == [0, 2]
    assert allowed(masks) == [[2], [0]], "output kept over a retraction has been seen"


def test_tokens_are_seen_once_and_in_order(constraints: Constraints, engine: CountingEngine) -> None:
    constraints.admit(0, follows(), known(7), 1)
    for token in (40, 41):
        pending = constraints.begin(rows(3, 0))
        assert pending is not None
        pending.result()
        constraints.sampled(rows(3, 0), lambda token=token: rows(99, token))
    pending = constraints.begin(rows(0))
    assert pending is not None
    assert allowed(pending.result()) == [[2]]
    assert engine.made[0].seen == [40, 41]


def test_masks_that_are_asked_for_again_fail_again(constraints: Constraints, engine: CountingEngine) -> None:
    """A step that has found no memory requests its masks again: by then the refused token is taken."""
    constraints.admit(0, follows(), known(7), 1)
    first = constraints.begin(rows(0))
    assert first is not None
    first.result()

    def refuse(token_id: int) -> None:
        raise GrammarFailure("not this token")

    engine.made[0].consume = refuse  # type: ignore[method-assign]
    constraints.sampled(rows(0), lambda: rows(40))
    for _ in range(2):
        pending = constraints.begin(rows(0))
        assert pending is not None
        assert pending.result().failures == {0: "the grammar of this request cannot go on: not this token"}


def test_the_token_is_waited_for_beside_the_caller(constraints: Constraints) -> None:
    """The worker waits for the token of the last step while the caller goes on."""
    constraints.admit(0, follows(), known(7), 1)
    first = constraints.begin(rows(0))
    assert first is not None
    first.result()
    on_device = threading.Event()
    waited_by: list[str] = []

    def tokens() -> np.ndarray:
        waited_by.append(threading.current_thread().name)
        assert on_device.wait(far(10))
        return rows(0)

    constraints.sampled(rows(0), tokens)
    pending = constraints.begin(rows(0))  # returns although the token is not there
    on_device.set()
    assert pending is not None
    assert allowed(pending.result()) == [[1]]
    assert waited_by[0].startswith("grammar")


def test_a_row_that_changes_hands_begins_anew(constraints: Constraints) -> None:
    constraints.admit(0, follows(), known(7), 1)
    pending = constraints.begin(rows(0))
    assert pending is not None
    pending.result()
    constraints.sampled(rows(0), lambda: rows(5))
    constraints.admit(0, follows(), known(8), 1)
    again = constraints.begin(rows(0))
    assert again is not None
    assert allowed(again.result()) == [[0]]
    constraints.admit(0, SamplingParams(), known(8), 1)
    assert constraints.begin(rows(0)) is None


@pytest.mark.parametrize("source", ["0", "wrong"])
def test_a_grammar_that_cannot_go_on_fails_its_row_alone(constraints: Constraints, source: str) -> None:
    constraints.admit(0, follows(source), known(7), 1)
    constraints.admit(1, follows(), known(7), 1)
    pending = constraints.begin(rows(1, 0))
    assert pending is not None
    masks = pending.result()
    assert list(masks.failures) == [1]
    assert "cannot go on" in masks.failures[1]
    sampler = Sampler(4, VOCAB, 64, CPU)
    for row in (0, 1):
        sampler.admit((Newcomer(row, SamplingParams(temperature=0.0, min_tokens=3), known(7), 1),), [5])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    assert sampler.sample(logits, rows(1, 0), rows(1, 1), masks).token_ids_N.tolist() == [0, -1]


class Work:
    """The work of each thread, in seconds."""

    def __init__(self) -> None:
        self._by_thread: Counter[int] = Counter()

    def clock(self) -> float:
        return self._by_thread[threading.get_ident()]

    def add(self, seconds: float) -> None:
        self._by_thread[threading.get_ident()] += seconds  # type: ignore[assignment]

    @property
    def total(self) -> float:
        return self._by_thread.total()


def test_a_row_whose_grammar_takes_too_long_fails_and_leaves_the_step_to_the_others(engine: CountingEngine) -> None:
    """One row takes 30 ms a token, the others a millisecond."""
    work = Work()
    constraints = Constraints(GrammarCache(lambda: engine), VOCAB, CPU, work.clock)
    for row in range(3):
        constraints.admit(row, follows(), known(7), 1)
        constraints.rows[row].matcher.result()
    for number, matcher in enumerate(engine.made):

        def fill(mask: Mask, number: int = number, fill: Callable[[Mask], None] = matcher.fill) -> None:
            work.add(0.03 if number == 1 else 0.001)
            fill(mask)

        matcher.fill = fill  # type: ignore[method-assign]
    steps, failures = 0, {}
    while not failures and steps < BUDGET_TOKENS:
        pending = constraints.begin(rows(0, 1, 2))
        assert pending is not None
        failures, steps = pending.result().failures, steps + 1
        constraints.sampled(rows(0, 1, 2), lambda: rows(1, 1, 1))
    assert list(failures) == [1]
    assert "too ambiguous to follow" in failures[1]
    assert 0 < steps < BUDGET_TOKENS / 2
    before = work.total
    pending = constraints.begin(rows(0, 1, 2))
    assert pending is not None
    assert list(pending.result().failures) == [1]
    assert work.total - before < 0.01, "it costs the step nothing any more"


@pytest.mark.parametrize(("must_agree", "first_s"), [(False, 0.2), (True, 9.0)])
def test_a_slow_token_now_and_then_is_no_reason_and_ranks_that_must_agree_end_no_row(
    engine: CountingEngine, must_agree: bool, first_s: float
) -> None:
    work = Work()
    constraints = Constraints(GrammarCache(lambda: engine), VOCAB, CPU, work.clock, must_agree=must_agree)
    constraints.admit(0, follows(), known(7), 1)
    constraints.rows[0].matcher.result()
    engine.made[-1].fill = lambda mask: work.add(first_s)  # type: ignore[method-assign]
    pending = constraints.begin(rows(0))
    assert pending is not None
    assert pending.result().failures == {}


def test_the_mask_of_a_slow_row_is_computed_beside_the_steps_of_the_others(engine: CountingEngine) -> None:
    """The mask of a slow row waits for an event here; the masks of the other row do not wait for it."""
    work, goes_on = Work(), threading.Event()
    constraints = Constraints(GrammarCache(lambda: engine), VOCAB, CPU, work.clock)
    for row in (4, 5):
        constraints.admit(row, follows(), known(7), 1)
        constraints.rows[row].matcher.result()
    slow, fill = engine.made[0], engine.made[0].fill

    def fill_slowly(mask: Mask) -> None:
        if slow.seen:
            assert goes_on.wait(far(10))
        work.add(2 * LATE_S if len(slow.seen) < 2 else 0.0)
        fill(mask)

    slow.fill = fill_slowly  # type: ignore[method-assign]
    pending = constraints.begin(rows(4, 5))
    assert pending is not None
    pending.result()
    assert constraints.ahead == {}, "it is not known as slow before that"
    constraints.sampled(rows(4, 5), lambda: rows(0, 0))
    ahead = dict(constraints.ahead)
    assert list(ahead) == [4]
    for count in range(1, 4):
        pending = constraints.begin(rows(5))
        assert pending is not None
        assert allowed(pending.result()) == [[count]]
        constraints.sampled(rows(5), lambda: rows(0))
        assert not ahead[4].done()
    goes_on.set()
    for _ in range(2):  # also if a step asks for it again
        pending = constraints.begin(rows(4))
        assert pending is not None
        assert allowed(pending.result()) == [[1]], "it has seen its token once"
    constraints.sampled(rows(4), lambda: rows(0))
    assert list(constraints.ahead) == [4]
    pending = constraints.begin(rows(4))
    assert pending is not None
    assert allowed(pending.result()) == [[2]]
    constraints.sampled(rows(4), lambda: rows(0))
    assert constraints.ahead == {}, "it was quick this time"


def test_slow_rows_rest_after_each_mask_until_a_step_waits_for_one(engine: CountingEngine) -> None:
    """A mask here takes a thousand seconds by the clock, so that the rest after it lasts longer than any test."""
    work = Work()
    constraints = Constraints(GrammarCache(lambda: engine), VOCAB, CPU, work.clock, must_agree=True)
    constraints.admit(0, follows(), known(7), 1)
    constraints.rows[0].matcher.result()
    fill = engine.made[0].fill

    def fill_slowly(mask: Mask) -> None:
        work.add(1000.0)
        fill(mask)

    engine.made[0].fill = fill_slowly  # type: ignore[method-assign]
    first = constraints.begin(rows(0))
    assert first is not None
    first.result()
    constraints.sampled(rows(0), lambda: rows(0))
    assert constraints.ahead[0].result(far(10))[1] == "", "the rest comes after a mask of its thread"
    pending = constraints.begin(rows(0))
    assert pending is not None
    assert allowed(pending.result()) == [[1]]
    constraints.sampled(rows(0), lambda: rows(0))
    with pytest.raises(TimeoutError):
        constraints.ahead[0].result(0.05)
    pending = constraints.begin(rows(0))
    assert pending is not None
    assert allowed(pending.result()) == [[2]], "a step that waits ends the rest"
    constraints.close()


def test_a_slow_row_that_changes_hands_is_slow_no_more(engine: CountingEngine) -> None:
    work = Work()
    constraints = Constraints(GrammarCache(lambda: engine), VOCAB, CPU, work.clock)
    constraints.admit(0, follows(), known(7), 1)
    constraints.rows[0].matcher.result()
    engine.made[0].fill = lambda mask: work.add(2 * LATE_S)  # type: ignore[method-assign]
    pending = constraints.begin(rows(0))
    assert pending is not None
    pending.result()
    constraints.sampled(rows(0), lambda: rows(0))
    assert list(constraints.ahead) == [0]
    constraints.admit(0, SamplingParams(), known(7), 1)
    assert constraints.ahead == {}


def sampled(change: Callable[[torch.Tensor], None] = lambda logits: None, **params: float) -> list[int]:
    """64 rows at once, half of them constrained to tokens 3 and 40."""
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2))
    change(logits)
    before = logits.clone()
    words = np.zeros((32, 3), dtype=np.int32)
    words[:, 0], words[:, 1] = 1 << 3, 1 << (40 - 32)

    def draw(masks: Masks | None) -> list[int]:
        sampler = Sampler(64, VOCAB, 64, CPU)
        for row in range(64):
            sampler.admit((Newcomer(row, SamplingParams(seed=row, **params), known(7), 1),), [5])
        positions = np.ones(64, dtype=np.int64)
        return sampler.sample(logits, np.arange(64), positions, masks).token_ids_N.tolist()

    tokens = draw(Masks(torch.arange(0, 64, 2), torch.from_numpy(words), {}))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits are left as they were"
    assert tokens[1::2] == draw(None)[1::2], "others draw what they would have drawn"
    return tokens[0::2]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 2.0, "min_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "min_tokens": 5},
    ],
)
def test_nothing_but_what_is_allowed_is_drawn(params: dict[str, float]) -> None:
    assert set(sampled(**params)) <= {3, 40}


def test_cuts_are_made_among_what_is_allowed() -> None:
    assert set(sampled(temperature=1.0)) == {3, 40}


def test_a_nan_anywhere_still_fails_the_row() -> None:
    def spoil(logits: torch.Tensor) -> None:
        logits[0, 60] = torch.nan  # not an allowed token

    assert sampled(spoil, temperature=0.0)[0] == -1
