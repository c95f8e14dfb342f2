"""What a router passes on of a marked stream, and what it remembers of it, however the bytes come."""

import pytest

from server.replicas.passage import Passage

STREAM = (
    b"data: a\n\n: 0 01000000 0 5 1\n\nevent: x\ndata: b\n\ndata: c\n\n: 1 0200000003000000 2 0 2\n\n"
    b": 0  0 0 0\n\ndata: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_events_and_what_they_tell_go_together(size: int) -> None:
    passage, told = Passage(b"{}"), b""
    for at in range(0, len(STREAM), size):
        new = passage.take(STREAM[at : at + size])
        told += new
        # What was passed on is never more, nor less, than what is known of it.
        assert passage.num_tokens == told.count(b"data: a") + 2 * told.count(b"data: c")
    assert told == b"data: a\n\nevent: x\ndata: b\n\ndata: c\n\n"
    assert (passage.num_prompt_tokens, passage.num_tokens, passage.has_begun) == (5, 3, True)
    assert passage.rest() == b"data: [DONE]\n\n"


def test_what_was_held_back_comes_again_from_the_next_replica() -> None:
    passage = Passage(b"{}")
    assert passage.take(b"data: a\n\n: 0 01000000 0 5 1\n\ndata: b\n\n: 0 02") == b"data: a\n\n"
    passage.body()
    assert passage.take(b"data: b\n\n: 0 02000000 0 0 1\n\n") == b"data: b\n\n"
    assert passage.num_tokens == 2


def test_what_was_aborted_does_not_go_on() -> None:
    passage = Passage(b"{}")
    passage.take(b"data: a\n\n: 0 01000000 3 5 1\n\n")
    assert passage.was_aborted
