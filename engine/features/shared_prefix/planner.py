"""Prompts with one prefix, which is computed once: a sequence waits for a running prefill that computes its prefix.

Owns: which prompts are not in the tree yet, and the sequences that wait for them.  Does not know: the queue's order.
"""

import numpy as np

from engine.plugins.features import FeatureContext
from engine.scheduling.events import Why
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import WORTH_WAITING_TOKENS, Sequence, TokenIds

Stem = tuple[str, str, bytes]


class SharedPrefixPlanner(PlannerFeature):
    """The sequences of one planner that wait for a prefix."""

    order = -1  # a prefix that is computed now is not read from elsewhere

    def __init__(self, parts: PlannerParts) -> None:
        self._limits = parts.limits
        self._features = parts.features
        self._table = parts.table
        self._pages = parts.pages
        self._prefills = parts.prefills
        # Rows whose prompt is not in the tree yet, by the beginning of the prompt: other sequences may share it.
        self._unshared: dict[Stem, set[int]] = {}
        # Sequences that wait for such a row, each with the number of its tokens that must be in the tree first.
        self._waiting: dict[int, list[tuple[int, Sequence]]] = {}

    def num_held(self) -> int:
        """Return the number of sequences that wait for a prefix."""
        return sum(map(len, self._waiting.values()))

    def started(self, sequence: Sequence) -> None:
        self._unshared.setdefault(_stem(sequence), set()).add(sequence.row)

    def hold(self, sequence: Sequence) -> Why | None:
        """Keep a sequence if a running prefill will soon publish more of its prefix than is cached now."""
        rows = self._unshared.get(_stem(sequence))
        if rows is None or sequence.params.needs_whole_prompt:
            return None
        table = self._table
        end = self._pages.num_cached_tokens(sequence) + max(self._limits.page_size, WORTH_WAITING_TOKENS)
        common, row = max(
            (_num_common(table.tokens[row, : table.num_known[row]], sequence.tokens), row) for row in rows
        )
        # One token must always be computed, so a prefix that covers the whole prompt saves one token less.
        if min(common, len(sequence.tokens) - 1) < end:
            return None
        for shared_tokens in self._features.shared_tokens:
            common = shared_tokens(row, min(common, len(sequence.tokens) - 1), end)
            if common < end:
                return None
        self._waiting.setdefault(row, []).append((common, sequence))
        return "aside"

    def published(self, row: int, num_tokens: int) -> None:
        """Queue sequences that waited for this much of the row's prompt to be in the tree."""
        sequence = self._table.sequences[row]
        if sequence is None or num_tokens == len(sequence.tokens):
            self.left(row)
        elif row in self._waiting:
            waiting = self._waiting.pop(row)
            if still := [entry for entry in waiting if entry[0] > num_tokens]:
                self._waiting[row] = still
            for awaited, other in waiting:
                if awaited <= num_tokens:
                    self._prefills.wait(other)

    def left(self, row: int) -> None:
        """Queue the sequences that wait for a row that publishes no more of its prompt."""
        sequence = self._table.sequences[row]
        assert sequence is not None, f"row {row} is free"
        rows = self._unshared.get(stem := _stem(sequence))
        if rows is not None:
            rows.discard(row)
            if not rows:
                del self._unshared[stem]
        for _, other in self._waiting.pop(row, ()):
            self._prefills.wait(other)

    def forget(self, sequence: Sequence) -> bool:
        for waiting in self._waiting.values():
            for entry in waiting:
                if entry[1] is sequence:
                    waiting.remove(entry)
                    return True
        return False

    def reset(self) -> list[Sequence]:
        held = [sequence for waiting in self._waiting.values() for _, sequence in waiting]
        self._waiting.clear()
        self._unshared.clear()
        return held


def _stem(sequence: Sequence) -> Stem:
    """Return the key under which sequences that may share a prefix worth waiting for meet."""
    return sequence.cache_salt, sequence.weights, sequence.tokens[:WORTH_WAITING_TOKENS].tobytes()


def _num_common(first: TokenIds, second: TokenIds) -> int:
    """Return the number of tokens that two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def planner_feature(context: FeatureContext) -> NewFeature:
    """Return the builder of the feature, which every planner has."""
    return SharedPrefixPlanner
