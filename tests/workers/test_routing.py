"""A step's tokens dealt out: nothing is lost, nothing goes to the wrong home, and details stay with their line."""

import numpy as np
import pytest

from engine.messages import StepExtras, Tokens
from engine.types.logprobs import Logprobs, PromptLogprobs
from engine.workers.tokenizers import RequestRouter


def tokens(request_ids: list[int], **details: object) -> Tokens:
    """A line per request: its token is ten times its id, its finish its id's last bit."""
    ids = np.array(request_ids, dtype=np.int64)
    return Tokens(
        request_ids=ids.tobytes(),
        token_ids=(10 * ids).astype(np.int32).tobytes(),
        finishes=bytes(one & 1 for one in request_ids),
        **details,
    )  # type: ignore[arg-type]


def read(message: Tokens) -> list[tuple[int, int, int]]:
    ids = np.frombuffer(message.request_ids, dtype=np.int64).tolist()
    token_ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
    return list(zip(ids, token_ids, message.finishes, strict=True))


@pytest.mark.parametrize("num_homes", [1, 2, 3, 7])
def test_every_line_goes_to_its_home_once_and_in_order(num_homes: int) -> None:
    rng = np.random.default_rng(num_homes)
    shards = RequestRouter(num_homes)
    moved = {5: 0, 12: num_homes - 1}
    for request_id, home in moved.items():
        shards.move(request_id, home)
    for _ in range(20):
        ids = rng.permutation(40)[: rng.integers(0, 30)].tolist()
        extras = {one: StepExtras(logprobs=Logprobs(logprob=float(one))) for one in ids if one % 5 == 0}
        cached = {one: (one, 1) for one in ids if one % 3 == 0}
        message = tokens(ids, cached_tokens=cached, extras=extras)
        parts = dict(shards.split(message))
        for home in range(num_homes):
            theirs = [one for one in ids if moved.get(one, one % num_homes) == home]
            part = parts.get(home, tokens([]))
            assert read(part) == [(one, 10 * one, one & 1) for one in theirs]
            assert part.cached_tokens == {one: (one, 1) for one in theirs if one % 3 == 0}
            assert part.extras == {one: extras[one] for one in theirs if one % 5 == 0}


def test_a_part_of_a_prompt_travels_without_a_line() -> None:
    extras = {3: StepExtras(prompt_logprobs=PromptLogprobs(first=0, entries=(Logprobs(logprob=-1.0),)))}
    assert RequestRouter(2).split(tokens([], extras=extras)) == [(1, tokens([], extras=extras))]


def test_a_request_that_was_moved_is_forgotten_with_its_end() -> None:
    shards = RequestRouter(2)
    shards.move(4, 1)
    assert shards.home(4) == 1
    shards.forget(4)
    shards.forget(4)
    assert shards.home(4) == 0
