"""A short form of ``tests.server.edges``: numbers, ids and lists at their edges, in every way in and placement."""

import pytest

from tests.server.edges import PLACEMENTS, WAYS

NUM_REQUESTS = 120
SEED = 1  # another one than the long form begins with


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_asked_is_answered_and_a_stream_beside_it_never_changes(way: str, placement: str) -> None:
    result = WAYS[way](placement, NUM_REQUESTS, SEED)
    assert not result.faults, "\n".join(result.faults)
    assert result["healthy"] > 0
    assert result.total() - result["healthy"] == NUM_REQUESTS
    assert result["taken"] + result["200"] > 10, "requests that are served are among them"
