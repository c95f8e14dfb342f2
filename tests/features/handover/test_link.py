"""Hand-overs over TCP whose link is slow, cut or dead: answers are those of an undivided engine, and nothing hangs."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from callboard import LLM
from engine.features.handover.wish import Wish
from tests.features.handover.link import Link
from tests.features.handover.test_engine import (
    PARAMS,
    ask,
    checkpoint,
    configured,
    engine,
    free_ports,
    ids,
    until_nothing_is_held,
)
from tests.models.checkpoints import random_tokens
from tests.pace import far

pytestmark = pytest.mark.slow
__all__ = ["checkpoint"]
PROMPTS = [random_tokens(200, seed=1000 + number) for number in range(32)]
WHOLE = 199 // 16 * 16  # tokens of a prompt whose pages all came


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of an undivided engine."""
    with engine(checkpoint, {}) as llm:
        return [list(one.token_ids) for (one,) in ([llm.generate([prompt], PARAMS)[0]] for prompt in PROMPTS)]


@contextmanager
def linked(checkpoint: Path, folder: Path, **more: float) -> Iterator[tuple[LLM, LLM, list[Link]]]:
    """Two engines whose only way to each other is a link for each direction."""
    folder.mkdir(mode=0o700)
    ports = free_ports(2)
    with ExitStack() as stack:
        links = [stack.enter_context(Link(port)) for port in ports]
        peers = {name: f"tcp://127.0.0.1:{link.port}" for name, link in zip("pd", links, strict=True)}
        p, d = (
            stack.enter_context(
                engine(checkpoint, configured("tcp", name, folder, peers, listen=f"tcp://127.0.0.1:{port}", **more))
            )
            for name, port in zip("pd", ports, strict=True)
        )
        yield p, d, links


def handed_over(p: LLM, d: LLM, number: int, name: str) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of its prompt's came from the other engine."""
    ask(p, PROMPTS[number], Wish(offer=name, id=name))
    answer = ask(d, PROMPTS[number], Wish(peer="p", claim=name, id=name))
    return ids(answer), answer.usage.cached_tokens


def test_a_slow_link_brings_what_it_can_in_time(checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with linked(checkpoint, tmp_path / "rings", timeout_s=1.5) as (p, d, links):
        assert handed_over(p, d, 0, "fast") == (expected[0], WHOLE)
        num_bytes = sum(link.num_bytes for link in links)
        for link in links:
            link.bytes_per_s = num_bytes / 3.0
        began = time.monotonic()
        tokens, some = handed_over(p, d, 1, "slow")
        assert tokens == expected[1]
        assert some < WHOLE, "the link was no slower"
        assert time.monotonic() - began < far(10)
        until_nothing_is_held(d)


def test_a_dead_link_costs_the_time_limit_and_comes_back(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with linked(checkpoint, tmp_path / "rings", timeout_s=1.0, lease_s=2.0) as (p, d, links):
        assert handed_over(p, d, 0, "first") == (expected[0], WHOLE)
        for link in links:
            link.bytes_per_s = 0
        assert handed_over(p, d, 1, "dead") == (expected[1], 0)
        for link in links:
            link.bytes_per_s = 1e9
        came = []
        for number in range(2, 12):
            tokens, cached = handed_over(p, d, number, f"again{number}")
            assert tokens == expected[number]
            came.append(cached)
            if cached == WHOLE:
                break
        assert came[-1] == WHOLE, came
        until_nothing_is_held(p, d)


def test_connections_that_are_cut_again_and_again_change_no_token(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with linked(checkpoint, tmp_path / "rings", timeout_s=2.0) as (p, d, links):
        is_over = threading.Event()

        def cut() -> None:
            while not is_over.wait(0.15):
                for link in links:
                    link.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        try:
            for number in range(12):
                assert handed_over(p, d, number, f"cut{number}")[0] == expected[number]
        finally:
            is_over.set()
            cutting.join()
        until_nothing_is_held(p, d)
