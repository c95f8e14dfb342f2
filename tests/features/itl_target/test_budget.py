"""The adaptive budget learns what a step costs and cuts prefills so that the target holds."""

import numpy as np
import pytest

from engine.features.itl_target.budget import MIN_PREFILL_TOKENS, MOST_BEYOND, StepBudget

BASE, PER_DECODE, PER_TOKEN = 0.004, 0.00005, 0.0001
MOST = 2048


def taught(target_s: float, noise: float = 0.0, per_token: float = PER_TOKEN) -> StepBudget:
    budget, rng = StepBudget(target_s), np.random.default_rng(0)
    for _ in range(300):
        decodes, tokens = int(rng.integers(0, 64)), int(rng.choice([0, 0, 100, 300, 512]))
        seconds = BASE + PER_DECODE * decodes + per_token * tokens
        budget.observe(decodes, tokens, seconds * (1 + noise * rng.standard_normal()))
    return budget


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_step_of_the_budget_takes_as_long_as_the_target(noise: float) -> None:
    budget = taught(0.03, noise)
    for decodes in (1, 16, 64):
        seconds = BASE + PER_DECODE * decodes + PER_TOKEN * budget.prefill_tokens(decodes, MOST)
        assert seconds == pytest.approx(0.03, rel=0.02 + noise)


def test_the_budget_shrinks_as_the_decode_batch_grows() -> None:
    budget = taught(0.03)
    tokens = [budget.prefill_tokens(decodes, MOST) for decodes in (1, 100, 200, 400)]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] < tokens[0] / 2


def test_prompts_never_stand_still_even_if_the_target_is_out_of_reach() -> None:
    assert taught(0.001).prefill_tokens(8, MOST) == MOST_BEYOND
    assert taught(0.001, per_token=0.0003).prefill_tokens(8, MOST) == 7, "they add half of the decodes' 4.4 ms"
    assert taught(0.001, per_token=0.002).prefill_tokens(8, MOST) == MIN_PREFILL_TOKENS


def test_without_decodes_the_whole_step_is_free() -> None:
    assert taught(0.001).prefill_tokens(0, MOST) == MOST


def test_a_full_step_has_no_room() -> None:
    assert taught(0.01).prefill_tokens(64, 0) == 0


def test_it_follows_a_machine_that_becomes_slower() -> None:
    budget = taught(0.03)
    for _ in range(200):
        for tokens in (0, 256):
            budget.observe(8, tokens, 3 * (BASE + PER_DECODE * 8 + PER_TOKEN * tokens))
    seconds = 3 * (BASE + PER_DECODE * 8 + PER_TOKEN * budget.prefill_tokens(8, MOST))
    assert seconds == pytest.approx(0.03, rel=0.05)


def test_a_thousand_equal_steps_do_not_blow_up_what_is_known() -> None:
    budget = taught(0.03)
    for _ in range(3000):
        budget.observe(8, 0, BASE + PER_DECODE * 8)
    for _ in range(5):
        budget.observe(8, 200, BASE + PER_DECODE * 8 + PER_TOKEN * 200)
    assert BASE + PER_DECODE * 8 + PER_TOKEN * budget.prefill_tokens(8, MOST) == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_it_holds_while_step_times_scatter_and_after_a_long_stretch_without_prefills(seed: int) -> None:
    budget, rng = StepBudget(0.03), np.random.default_rng(seed)

    def observe(decodes: int, tokens: int) -> None:
        seconds = BASE + PER_DECODE * decodes + PER_TOKEN * tokens
        budget.observe(decodes, tokens, seconds * (1 + 0.1 * rng.standard_normal()))

    for _ in range(200):
        observe(int(rng.integers(1, 64)), int(rng.choice([0, 256])))
    for _ in range(5000):
        observe(32, 0)
    off = []
    for _ in range(300):
        observe(32, budget.prefill_tokens(32, MOST))
        off.append(abs(BASE + PER_DECODE * 32 + PER_TOKEN * budget.prefill_tokens(32, MOST) - 0.03) / 0.03)
    assert np.mean(np.array(off) > 0.3) < 0.02
