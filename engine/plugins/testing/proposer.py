"""The conformance kit for proposers: one call checks a proposer, and lists every case that fails.

    from engine.plugins.testing.proposer import check_proposer
    check_proposer(lambda: PromptLookup(longest=4), vocab_size=32_000)

Owns: texts and their pieces.  Does not know: torch, the quality of a proposal.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence

from engine.plugins.proof.findings import Findings
from engine.scheduling.proposer import Proposer

SLOW_S = 0.05  # for 1,024 tokens, or for one proposal: every request waits meanwhile


def check_proposer(make: Callable[[], Proposer], vocab_size: int = 1000) -> None:
    """Run sessions over texts of many kinds, in pieces of many sizes.  Raises ConformanceError with all that fails.

    make: builds a new one each time, as the plugin's hook does.  vocab_size: bound of the token ids."""
    findings = Findings("proposer")
    with findings.case("num_tokens"):
        num = make().num_tokens
        assert type(num) is int, f"num_tokens is {num!r}, not an int"
        assert 1 <= num <= 64, f"num_tokens is {num}, not from 1 to 64"
    for name, text in _texts(vocab_size).items():
        with findings.case(f"bounded: {name}"):
            _check_bounded(make(), text, vocab_size)
        with findings.case(f"the same in any pieces: {name}"):
            _check_cuts(make(), text)
        with findings.case(f"propose changes nothing: {name}"):
            _check_asking(make(), text)
    with findings.case("sessions are independent"):
        _check_apart(make())
    with findings.case("time"):
        _check_time(make(), vocab_size)
    findings.conclude()


def _texts(vocab_size: int) -> dict[str, list[int]]:
    rng = random.Random(0)
    phrase = [rng.randrange(vocab_size) for _ in range(40)]
    edited = [token if rng.random() < 0.9 else rng.randrange(vocab_size) for token in phrase]
    return {
        "nothing": [],
        "one token": [vocab_size - 1],
        "one token again and again": [0] * 50,
        "random": [rng.randrange(vocab_size) for _ in range(200)],
        "few different tokens": [rng.randrange(3) for _ in range(200)],
        "a text and its edit": phrase + edited,
    }


def _proposed(proposer: Proposer, pieces: Sequence[Sequence[int]], most: int) -> list[int]:
    session = proposer.open()
    for piece in pieces:
        session.extend(piece)
    return list(session.propose(most))


def _check_bounded(proposer: Proposer, text: list[int], vocab_size: int) -> None:
    session = proposer.open()
    for token in [None, *text]:
        if token is not None:
            session.extend([token])
        for most in (1, proposer.num_tokens):
            proposed = session.propose(most)
            assert len(proposed) <= most, f"{len(proposed)} tokens are proposed, at most {most} are allowed"
            assert all(type(one) is int for one in proposed), f"not ints: {list(proposed)!r:.100}"
            assert all(0 <= one < vocab_size for one in proposed), f"no token of {vocab_size}: {list(proposed)!r:.100}"


def _check_cuts(proposer: Proposer, text: list[int]) -> None:
    most = proposer.num_tokens
    whole = _proposed(proposer, [text], most)
    for size in (1, 2, 3, 31, 32, 33, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        cut = _proposed(proposer, pieces, most)
        assert cut == whole, f"given {size} at a time it proposes {cut}, given at once {whole}"


def _check_asking(proposer: Proposer, text: list[int]) -> None:
    session, silent = proposer.open(), proposer.open()
    for token in text:
        session.propose(proposer.num_tokens)
        session.extend([token])
        silent.extend([token])
    first, again = list(session.propose(proposer.num_tokens)), list(session.propose(proposer.num_tokens))
    assert first == again, f"called twice it proposes {first}, then {again}"
    other = list(silent.propose(proposer.num_tokens))
    assert first == other, f"called at every token it proposes {first}, called once {other}"


def _check_apart(proposer: Proposer) -> None:
    alone = _proposed(proposer, [[1, 2, 3, 1, 2]], proposer.num_tokens)
    session, other = proposer.open(), proposer.open()
    for token, else_ in zip([1, 2, 3, 1, 2], [1, 2, 4, 1, 2], strict=True):
        session.extend([token])
        other.extend([else_])
    parallel = list(session.propose(proposer.num_tokens))
    assert parallel == alone, f"next to another session it proposes {parallel}, alone {alone}"


def _check_time(proposer: Proposer, vocab_size: int) -> None:
    """Check the thread's own CPU time, without garbage collection, so that other programs and objects do not count."""
    rng = random.Random(1)
    session, slowest = proposer.open(), 0.0
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(8):
            piece = [rng.randrange(min(vocab_size, 50)) for _ in range(1024)]
            began = time.thread_time()
            session.extend(piece)
            extended = time.thread_time()
            session.propose(proposer.num_tokens)
            slowest = max(slowest, extended - began, time.thread_time() - extended)
    finally:
        if collects:
            gc.enable()
    assert slowest < SLOW_S, f"it took {slowest * 1000:.0f} ms for 1,024 tokens or a proposal; allowed are 50"
