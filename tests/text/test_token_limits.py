"""Masks of what an output may take, token by token."""

import numpy as np
import pytest

from engine.text.token_limits import TokenLimits
from engine.types.params import SamplingParams

NUM_WORDS = 2


def allowed(limits: TokenLimits) -> set[int]:
    mask = np.zeros(NUM_WORDS, dtype=np.int32)
    limits.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("others", [(), ((64,),), ((5, 1 << 20),), ((),)])
def test_a_word_that_the_model_cannot_spell_bans_nothing(others: tuple[tuple[int, ...], ...]) -> None:
    limits = TokenLimits(SamplingParams(bad_token_ids=((3,), (5, 31), *others)), NUM_WORDS)
    everything = set(range(32 * NUM_WORDS))
    assert allowed(limits) == everything - {3}
    limits.consume(5)
    assert allowed(limits) == everything - {3, 31}
    limits.consume(4)
    assert allowed(limits) == everything - {3}
