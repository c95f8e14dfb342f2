"""Suffix decoding: proposes what most often followed the longest earlier suffix, as long as it stays likely.

Unlike ``ngram`` it counts every earlier place, not only the last one, and proposes less if places disagree.  Suited to
outputs that repeat themselves with changes.  It takes three to five times as long per token.
Source: Oliaro et al. 2024, SuffixDecoding; here each request's own tokens alone, and suffixes of bounded length.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from engine.plugins.hookspecs import ProposerContext, hookimpl
from engine.plugins.options import Options, decode_options

CALLBOARD_PLUGIN = {"api": 1}

MOST_TOKENS = 1 << 14  # of each of the two remembered parts of a sequence, about 1 kB per token
Followers = dict[tuple[int, ...], int | dict[int, int]]


class SuffixOptions(Options, frozen=True):
    """Options of the plugin.

    num_tokens: most tokens that are proposed.  longest, shortest: lengths of the counted suffixes.
    likely: a proposal ends when its probability, by the counts, falls below this."""

    num_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    longest: Annotated[int, Meta(ge=1, le=32)] = 8
    shortest: Annotated[int, Meta(ge=1, le=32)] = 2
    likely: Annotated[float, Meta(ge=0, le=1)] = 0.2


class SuffixProposer:
    """Opens sessions that count what follows each suffix."""

    def __init__(self, options: SuffixOptions) -> None:
        self.num_tokens = options.num_tokens
        self._options = options

    def open(self) -> "SuffixSession":
        return SuffixSession(self._options)


class SuffixSession:
    """The suffixes of one sequence.

    followers: suffix -> the token that followed it once, or token -> how often it followed.  Of equally frequent tokens
    the later one is preferred.  older: of the MOST_TOKENS tokens before; earlier ones are forgotten."""

    def __init__(self, options: SuffixOptions) -> None:
        self._likely = options.likely
        self._lengths = tuple(range(options.longest, options.shortest - 1, -1)) or (options.longest,)
        self._tail: tuple[int, ...] = ()
        self._followers: Followers = {}
        self._older: Followers = {}
        self._num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens, with one count per token and length."""
        longest, tail = self._lengths[0], self._tail
        for token in token_ids:
            if self._num_tokens == MOST_TOKENS:
                self._older, self._followers, self._num_tokens = self._followers, {}, 0
            self._num_tokens += 1
            for length in self._lengths:
                if length <= len(tail):
                    self._note(tail[-length:], token)
            tail = (*tail, token)[-longest:]
        self._tail = tail

    def _note(self, suffix: tuple[int, ...], token: int) -> None:
        counts = self._followers.get(suffix)
        if counts is None:
            self._followers[suffix] = token
            return
        if isinstance(counts, int):
            counts = self._followers[suffix] = {counts: 1}
        counts[token] = counts.pop(token, 0) + 1  # moves it to the end

    def propose(self, most: int) -> Sequence[int]:
        """Return the proposal, token by token, each counted as output for the next."""
        tail, proposed, chance = self._tail, list[int](), 1.0
        while len(proposed) < most and (counts := self._counts(tail)) is not None:
            token, count = max(reversed(counts.items()), key=lambda item: item[1])
            chance *= count / sum(counts.values())
            if chance < self._likely:
                break
            proposed.append(token)
            tail = (*tail, token)[-self._lengths[0] :]
        return proposed

    def _counts(self, tail: tuple[int, ...]) -> dict[int, int] | None:
        """Return the counts of the longest suffix that occurred before, or None."""
        for length in self._lengths:
            for followers in (self._followers, self._older):
                if length <= len(tail) and (counts := followers.get(tail[-length:])) is not None:
                    return {counts: 1} if isinstance(counts, int) else counts
        return None


@hookimpl
def callboard_proposer(context: ProposerContext) -> SuffixProposer:
    """Options: see ``SuffixOptions``."""
    return SuffixProposer(decode_options("proposer.suffix", context.options, SuffixOptions))
