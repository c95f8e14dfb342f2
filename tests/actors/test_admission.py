"""Admission: which limit refuses a request beside those that are open, and the error that a client gets."""

import pytest

from engine.actors.admission import MAX_PICTURE_TOKENS, Load, prompt_cost
from engine.settings.sections import LimitsSection
from engine.types.errors import RequestError
from engine.types.prompt import ChatTurn, Picture

LIMITS = LimitsSection(max_requests=4, max_queued_tokens=100, max_requests_per_client=2)


@pytest.mark.parametrize(
    ("load", "cost", "limit"),
    [
        (Load(), 101, ""),  # alone, a prompt of any length
        (Load(num_open=3, num_queued_tokens=90), 10, ""),
        (Load(num_open=3, num_queued_tokens=90), 11, "max_queued_tokens"),
        (Load(num_leaving=1, num_queued_tokens=90), 11, "max_queued_tokens"),
        (Load(num_open=4), 0, "max_requests"),
        (Load(num_open=1, num_leaving=3), 0, "max_requests"),
        (Load(num_open=2, num_of_client=1), 0, ""),
        (Load(num_open=2, num_of_client=2), 0, "max_requests_per_client"),
        (Load(num_open=4, num_queued_tokens=100, num_of_client=4), 1, "max_requests"),
    ],
)
def test_a_limit_that_is_reached_refuses(load: Load, cost: int, limit: str) -> None:
    assert load.refusal(LIMITS, cost) == limit
    if not limit:
        load.check(LIMITS, cost)
        return
    with pytest.raises(RequestError, match=f"no more than {getattr(LIMITS, limit)} are accepted; try again") as refused:
        load.check(LIMITS, cost)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert refused.value.code == ("client_queue_full" if limit == "max_requests_per_client" else "queue_full")


def test_a_client_has_no_limit_of_its_own_by_default() -> None:
    Load(num_open=9, num_of_client=9).check(LimitsSection())


def test_pictures_cost_tokens_by_their_pixels() -> None:
    def cost(*sizes: tuple[int, int]) -> int:
        pictures = tuple(Picture(b"", "", *size) for size in sizes)
        return prompt_cost(None, None, [ChatTurn("user", "a", pictures=pictures, places=(0,) * len(sizes))])

    alone = cost()
    assert cost((1, 1)) == alone + 1
    assert cost((280, 280), (28, 56)) == alone + 101 + 3
    assert cost((8192, 8192)) == alone + MAX_PICTURE_TOKENS
