"""All abuse at once, for as long as there is time: ``soak.py``, held to its bounds."""

import pytest

from tests.figures import Figure
from tests.server.misuse import KINDS
from tests.server.soak import MOST_GROWTH, run

pytestmark = pytest.mark.slow

MINUTES = 5  # a night's run is `python -m tests.server.soak --minutes 30`
ROUND_S = 6.0


@pytest.mark.reliability("H10", "five minutes of everything: good clients among eight kinds of bad ones")
def test_after_each_round_of_abuse_all_is_as_it_was(figure: Figure, at_full_size: bool) -> None:
    soak = run(round(60 * MINUTES / (ROUND_S + 1)), ROUND_S) if at_full_size else run(3, 1.0)
    assert all(soak.counts[kind] for kind in KINDS), soak.counts
    assert not soak.faults
    figure("files more or less", soak.spread("files"), at_most=0)
    figure("tasks more or less", soak.spread("tasks"), at_most=0)
    if at_full_size:
        figure("requests", soak.readings[-1].requests, at_least=50_000)
        figure("memory at the end, of halfway", soak.growth(), at_most=MOST_GROWTH)
