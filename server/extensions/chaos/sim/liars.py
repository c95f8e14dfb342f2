"""Proposers for tests: they know what a model will say, and propose it rightly, wrongly, or by halves."""

import random
from collections.abc import Callable, Sequence

from engine.features.speculation.payoff import Chance, Payoff


class Liar:
    """Sessions of one kind.  next_token: what the model says behind some tokens."""

    def __init__(self, kind: str, next_token: Callable[[Sequence[int]], int], vocab_size: int, num: int = 4) -> None:
        self.kind, self.next_token, self.vocab_size, self.num_tokens = kind, next_token, vocab_size, num

    def open(self) -> "LiarSession":
        return LiarSession(self)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return what a draft model does: so many, all of them tokens, or none."""
        session = self.open()
        session.extend(tokens)
        proposed = list(session.propose(most))[:most]
        return proposed if len(proposed) == most and all(0 <= one < self.vocab_size for one in proposed) else []


class LiarSession:
    """The session of one sequence, by its kind.

    right: all is true.  half: every other token may be.  wrong: none is.  random: any tokens.
    many: more than was asked for.  strange: one is no token of the model's.  moody: sometimes nothing."""

    def __init__(self, liar: Liar) -> None:
        self._liar = liar
        self._tokens: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def propose(self, most: int) -> list[int]:
        liar, tokens = self._liar, list(self._tokens)
        rng = random.Random(hash(tuple(tokens)))
        if liar.kind == "random":
            return [rng.randrange(liar.vocab_size) for _ in range(most)]
        if liar.kind == "moody" and rng.random() < 0.5:
            return []
        count = {"many": 3 * most, "moody": rng.randint(0, most)}.get(liar.kind, most)
        for _ in range(count):
            token = liar.next_token(tokens)
            if liar.kind == "wrong" or (liar.kind == "half" and rng.random() < 0.5):
                token = (token + 1) % liar.vocab_size
            tokens.append(token)
        if liar.kind == "strange":
            tokens[len(self._tokens) + rng.randrange(count)] = rng.choice((-1, -7, liar.vocab_size, 1 << 40))
        return tokens[len(self._tokens) :]


def from_sequences(sequences: Sequence[Sequence[int]]) -> Callable[[Sequence[int]], int]:
    """Return a ``Liar.next_token`` that knows these sequences whole."""
    following = {hash(tuple(one[:end])): one[end] for one in sequences for end in range(len(one))}
    return lambda tokens: following.get(hash(tuple(tokens)), 0)


KINDS = ("right", "half", "wrong", "random", "many", "strange", "moody")


class Everything(Payoff):
    """Whatever steps cost, all that is proposed is verified, as far as it fits a step."""

    def knows(self, num_rows: int) -> bool:
        return True

    def counts(self, chances: Sequence[Chance], num_rows: int, most: int) -> list[int]:
        counts = []
        for chance in chances:
            counts.append(max(0, min(chance.num, most)))
            most -= counts[-1]
        return counts
