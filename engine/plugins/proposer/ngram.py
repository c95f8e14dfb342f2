"""Prompt lookup: proposes what followed an earlier occurrence of the last few tokens, in the prompt or in the output.

Suited to answers that repeat their input: edits of text or code, summaries, extracts, answers from documents.
Source: Saxena 2023, prompt lookup decoding.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from engine.plugins.hookspecs import ProposerContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}

FACTOR = 0x9E3779B97F4A7C15  # odd, so that no token is multiplied away
MASK = (1 << 64) - 1
MANY = 32  # from this many new tokens on numpy is faster


class NgramOptions(Options, frozen=True):
    """Options of the plugin.

    num_tokens: most tokens that are proposed.
    longest, shortest: lengths of the last tokens to look up, the longest first."""

    num_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    longest: Annotated[int, Meta(ge=1, le=32)] = 4
    shortest: Annotated[int, Meta(ge=1, le=32)] = 2


class NgramProposer:
    """Opens sessions that remember the last place of each n-gram."""

    def __init__(self, options: NgramOptions) -> None:
        self.num_tokens = options.num_tokens
        self._lengths = tuple(range(options.longest, options.shortest - 1, -1)) or (options.longest,)

    def open(self) -> "NgramSession":
        return NgramSession(self._lengths)


class NgramSession:
    """The n-grams of one sequence.

    places: for each length, hash of an n-gram -> the place of the token after its last occurrence.  Two n-grams with
    the same hash are treated as one; verification by the model corrects that."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, dict[int, int]] = {length: {} for length in lengths}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens, in constant time for each."""
        start = len(self._tokens)
        self._tokens += token_ids
        for length, places in self._places.items():
            first = max(start, length)
            if len(self._tokens) - first >= MANY:
                places.update(zip(self._hashes(first, length), range(first, len(self._tokens)), strict=True))
            else:
                for place in range(first, len(self._tokens)):
                    places[self._hash(place, length)] = place

    def propose(self, most: int) -> Sequence[int]:
        """Return what followed the last tokens; if that reaches the end, it is repeated."""
        tokens = self._tokens
        for length, places in self._places.items():
            place = places.get(self._hash(len(tokens), length)) if len(tokens) >= length else None
            if place is not None:
                period = tokens[place : place + most]
                return [period[nth % len(period)] for nth in range(most)]
        return ()

    def _hash(self, end: int, length: int) -> int:
        """Return the hash of the n-gram before a place."""
        value = 0
        for token in self._tokens[end - length : end]:
            value = value * FACTOR + token + 1 & MASK
        return value

    def _hashes(self, first: int, length: int) -> list[int]:
        """Return the hashes of the n-grams before every place from ``first`` on."""
        tokens = np.array(self._tokens[first - length : -1], dtype=np.uint64)
        count = len(tokens) - length + 1
        values = np.zeros(count, dtype=np.uint64)
        for nth in range(length):
            values = values * np.uint64(FACTOR) + tokens[nth : nth + count] + np.uint64(1)
        hashes: list[int] = values.tolist()
        return hashes


@hookimpl
def callboard_proposer(context: ProposerContext) -> NgramProposer:
    """Options: see ``NgramOptions``."""
    return NgramProposer(decode_options("proposer.ngram", context.options, NgramOptions))
