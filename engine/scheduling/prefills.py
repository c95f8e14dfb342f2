"""The prefill half of a step: which sequences start, and how many tokens of which prompt are computed.

Owns: prompts under way and their turns, the estimate of how long steps take.
Does not know: decodes' pages, what a finished step means.
Prompts take turns, a chunk each, and the waiting queue takes a turn like a prompt: so a long prompt cannot keep
short ones waiting, and a stream of short ones cannot keep a long one from going on.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from engine.messages import Admission
from engine.scheduling.events import PlannerEvents, Why
from engine.scheduling.feature import PlannerFeatures
from engine.scheduling.meter import StepRecord
from engine.scheduling.pages import PageManager
from engine.scheduling.queue import Quarantine
from engine.scheduling.requests import OutputForecast, peak_growth
from engine.scheduling.rows import WORTH_WAITING_TOKENS, PlannerLimits, RowTable, Sequence, TokenIds

MIN_PREFILL_TOKENS = 16  # a prompt never stands still, however many rows decode
FORGETTING = 0.97
ANCHOR = 0.01  # weight of the last solution, in steps
QUEUE = -1  # stands for the waiting queue among the rows that take turns
Stem = tuple[str, str, bytes]


@dataclass(slots=True)
class Segments:
    """The prefill half of one step.  started: sequences that got a row for it."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)


class Prefills:
    """Rows between their first step and their first token.  budget: is fitted to completed steps."""

    def __init__(
        self,
        limits: PlannerLimits,
        table: RowTable,
        page_manager: PageManager,
        waiting: Quarantine,
        forecast: OutputForecast,
        features: PlannerFeatures,
        events: PlannerEvents,
    ) -> None:
        self.budget = StepBudget(limits.max_step_tokens, limits.itl_target_s)
        self._limits = limits
        self._table = table
        self._page_manager = page_manager
        self._waiting = waiting
        self._forecast = forecast
        self._features = features
        self._events = events
        self._turns: deque[int] = deque([QUEUE])
        # Rows whose prompt is not in the tree yet, by the beginning of the prompt: other sequences may share it.
        self._unshared: dict[Stem, set[int]] = {}
        # Sequences that wait for such a row, each with the number of its tokens that must be in the tree first.
        self._aside: dict[int, list[tuple[int, Sequence]]] = {}
        self._blocked = False

    def retune(self, limits: PlannerLimits) -> None:
        """Use another prefill chunk and latency target from now on."""
        self.budget = StepBudget(limits.max_step_tokens, limits.itl_target_s)
        self._limits = limits

    def completed(self, step: StepRecord) -> None:
        """Fit the budget to the duration of a step: an event, as in ``PlannerWatcher``."""
        if self.budget.learns:
            self.budget.observe(step.num_decodes, step.num_prefill_tokens, step.completed_at - step.began_at)

    def __len__(self) -> int:
        """Number of prompts under way."""
        return len(self._turns) - 1

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row."""
        num_held = sum(one.num_held for one in self._features.all)
        return len(self._waiting) + sum(map(len, self._aside.values())) + num_held

    @property
    def may_go_on(self) -> bool:
        """Whether ``plan`` may find something to do."""
        return len(self._turns) > 1 or self._may_start

    @property
    def _may_start(self) -> bool:
        if self._blocked or not len(self._waiting) or not self._table.num_free:
            return False
        return not any(blocks() for blocks in self._features.blocks)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that needs a row."""
        self._push(sequence)
        self._blocked = False

    def _push(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        self._note_wait(sequence, "queue")

    def _note_wait(self, sequence: Sequence, why: Why) -> None:
        for waits in self._events.waits:
            waits(sequence, why)

    def lets_wait(self) -> bool:
        """Return whether a sequence may give up its turn for a while."""
        return self._waiting.lets_wait()

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that waits."""
        for forget in self._features.forget:
            if forget(sequence):
                return
        for aside in self._aside.values():
            for entry in aside:
                if entry[1] is sequence:
                    aside.remove(entry)
                    return
        self._waiting.remove(sequence)

    def clear(self) -> None:
        """Forget every prompt under way.  Sequences that waited for one are queued like all others."""
        self._turns = deque([QUEUE])
        self._unshared.clear()
        for aside in self._aside.values():
            for _, sequence in aside:
                self._push(sequence)
        for sequence in self._features.reset():
            self._push(sequence)
        self._aside.clear()
        self._blocked = False

    def unblock(self) -> None:
        """Try again to start the first sequence, for which there was no room."""
        self._blocked = False

    def leave(self, row: int) -> None:
        """End the row's prompt; harmless if it is not under way."""
        if row in self._turns:
            self._turns.remove(row)
        sequence = self._table.sequences[row]
        assert sequence is not None, f"row {row} is free"
        self._publishes_no_more(row, sequence)

    def published(self, row: int, num_tokens: int) -> None:
        """Queue sequences that waited for this much of the row's prompt to be in the tree."""
        sequence = self._table.sequences[row]
        assert sequence is not None, f"row {row} is free"
        self._blocked = False
        if num_tokens == len(sequence.tokens):
            self._publishes_no_more(row, sequence)
        elif row in self._aside:
            aside = self._aside.pop(row)
            if still := [entry for entry in aside if entry[0] > num_tokens]:
                self._aside[row] = still
            for awaited, other in aside:
                if awaited <= num_tokens:
                    self._push(other)

    def _publishes_no_more(self, row: int, sequence: Sequence) -> None:
        rows = self._unshared.get(stem := _stem(sequence))
        if rows is not None:
            rows.discard(row)
            if not rows:
                del self._unshared[stem]
        for _, other in self._aside.pop(row, ()):
            self._push(other)

    # ---- planning ---------------------------------------------------------------------------

    def plan(self, num_decodes: int) -> Segments:
        """Plan the prompts of a step within the budget that so many decodes leave.

        Each prompt and the queue get a chunk in their turn; the rest goes to new sequences.  Without decodes, what is
        left after that lengthens the prompts of the step; with decodes it would delay their tokens.  A row whose last
        chunk is in the step takes no more turns: its first token will be sampled."""
        segments, budget = Segments(), self.budget.prefill_tokens(num_decodes)
        if self._may_start:
            self._waiting.rerank(self._page_manager.num_cached_tokens)
        for turn in list(self._turns):
            if budget <= 0:
                break
            if turn == QUEUE:
                budget -= self._start_some(segments, budget, self._limits.prefill_chunk)
            else:
                budget -= self._add_chunk(segments, turn, budget)
            if turn in self._turns:
                self._turns.remove(turn)
                self._turns.append(turn)
        if budget > 0:
            budget -= self._start_some(segments, budget, budget)
        if not num_decodes:
            self._spread(segments, budget)
        return segments

    def _spread(self, segments: Segments, budget: int) -> None:
        """Lengthen the chunks of a step, in their order."""
        table = self._table
        for index, row in enumerate(segments.rows):
            sequence = table.sequences[row]
            if segments.samples[index] or sequence is None or sequence.params.prompt_logprobs is not None:
                continue
            more = min(int(table.num_known[row] - table.num_computed[row]), budget)
            self._lengthen(segments, index, more)
            budget -= more

    def _start_some(self, segments: Segments, budget: int, turn: int) -> int:
        """Give rows to waiting sequences, and add their first chunks.  Return the number of tokens in these.

        It goes on while rows, pages and ``budget`` allow, but starts no sequence once ``turn`` tokens are used."""
        used = 0
        while used < min(turn, budget) and self._may_start and (sequence := self._waiting.first()) is not None:
            if why := self._hold_back(sequence):
                self._waiting.pop(starts=False)
                self._note_wait(sequence, why)
                continue
            row = self._page_manager.start(sequence, self._reserve(sequence))
            if row is None:
                self._blocked = True
                self._note_wait(sequence, "no_room")
                break
            self._waiting.pop(starts=True)
            self._turns.append(row)  # after all rows that have not had their turn yet
            self._unshared.setdefault(_stem(sequence), set()).add(row)
            segments.started.append(sequence)
            segments.admissions.append(self._admission(sequence))
            used += self._add_chunk(segments, row, budget - used)
        return used

    def _add_chunk(self, segments: Segments, row: int, budget: int) -> int:
        table = self._table
        start, known = int(table.num_computed[row]), int(table.num_known[row])
        length = min(known - start, self._limits.prefill_chunk, budget)
        sequence = table.sequences[row]
        if sequence is not None and sequence.params.prompt_logprobs is not None:
            length = min(length, self._limits.scored_chunk)
        segments.rows.append(row)
        segments.starts.append(start)
        segments.lengths.append(0)
        segments.samples.append(0)
        self._lengthen(segments, len(segments.rows) - 1, length)
        return length

    def _lengthen(self, segments: Segments, index: int, more: int) -> None:
        """Compute so many more tokens of a row that is in the step."""
        table, row = self._table, segments.rows[index]
        segments.lengths[index] += more
        table.num_computed[row] += more
        if table.num_computed[row] == table.num_known[row]:
            segments.samples[index] = 1
            table.num_planned[row] = table.num_known[row] + 1
            self._turns.remove(row)

    def _admission(self, sequence: Sequence) -> Admission:
        table, row = self._table, sequence.row
        num_computed = int(table.num_computed[row])
        if sequence.num_cached_at_start < 0:
            sequence.num_cached_at_start = min(num_computed, sequence.num_prompt)
        return Admission(
            row=row,
            token_ids=sequence.tokens.tobytes(),
            num_prompt_tokens=sequence.num_prompt,
            num_computed_tokens=num_computed,
            pages=table.page_table[row, : table.num_pages[row]].tobytes(),
            params=sequence.params,
        )

    def _hold_back(self, sequence: Sequence) -> Why | None:
        """Set a sequence aside whose turn has come, if that saves work.  Return the reason, None if it may start."""
        if self._defer_for_shared_prefix(sequence):
            return "aside"
        return "fetch" if any(hold(sequence) for hold in self._features.hold) else None

    def _defer_for_shared_prefix(self, sequence: Sequence) -> bool:
        """Let a sequence wait if a running prefill will soon publish more of its prefix than is cached now.

        It waits until that is published, instead of computing the same a second time.  Return whether it waits."""
        rows = self._unshared.get(_stem(sequence))
        if rows is None or sequence.params.needs_whole_prompt:
            return False
        table = self._table
        end = self._page_manager.num_cached_tokens(sequence) + max(self._limits.page_size, WORTH_WAITING_TOKENS)
        common, row = max(
            (_num_common(table.tokens[row, : table.num_known[row]], sequence.tokens), row) for row in rows
        )
        # One token must always be computed, so a prefix that covers the whole prompt saves one token less.
        if min(common, len(sequence.tokens) - 1) < end:
            return False
        self._aside.setdefault(row, []).append((common, sequence))
        return True

    def _reserve(self, sequence: Sequence) -> int:
        """Return the number of pages that must stay available when a sequence starts, for all that run to grow.

        0 if it would run alone: it fits, by the check at its arrival."""
        table, page_size = self._table, self._limits.page_size
        rows = np.flatnonzero(table.running)
        if not len(rows):
            return 0
        num_tokens = len(sequence.tokens)
        # The sequence itself comes last.
        known = np.append(table.num_known[rows], num_tokens)
        num_pages = np.append(table.num_pages[rows], -(-num_tokens // page_size))
        generated = known - np.append(table.num_prompt[rows], sequence.num_prompt)
        most = np.append(table.max_total[rows], sequence.max_total) - known
        slack = num_pages * page_size - known
        worst = int(np.maximum(-(-(most - slack) // page_size), 0).sum())
        if worst + int(num_pages[-1]) <= self._page_manager.num_available:
            return worst
        # One page for each sequence that may still want one, whatever the forecast is.
        at_least = int((most > slack).sum())
        given_back = num_pages - np.append(table.num_shared[rows], 0)
        growth = peak_growth(self._forecast.remaining(generated, most), slack, given_back, page_size)
        return min(worst, max(at_least, round(growth)))


def _stem(sequence: Sequence) -> Stem:
    """Return the key under which sequences that may share a prefix worth waiting for meet."""
    return sequence.cache_salt, sequence.weights, sequence.tokens[:WORTH_WAITING_TOKENS].tobytes()


def _num_common(first: TokenIds, second: TokenIds) -> int:
    """Return the number of tokens that two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


class StepBudget:
    """The number of prompt tokens that fit next to the decodes of a step without delaying them.

    seconds = base + per_decode * decodes + per_token * prompt tokens, by least squares over the steps that have run:
    machine, model and context lengths are in the coefficients.  The normal equations are kept with exponential
    forgetting and anchored to the last solution (Tikhonov), so that a long stretch of equal steps neither blows up nor
    loses coefficients that such steps do not show.
    target_s: time between two tokens of a running request; 0 for no target."""

    def __init__(self, max_step_tokens: int, target_s: float) -> None:
        self._max_step_tokens = max_step_tokens
        self._target_s = target_s
        self._costs = np.zeros(3)
        self._moments = np.zeros((3, 3))
        self._sums = np.zeros(3)

    @property
    def learns(self) -> bool:
        """Whether ``observe`` is of any use: only with a target."""
        return self._target_s > 0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Fit the costs to a step of this size that took so long."""
        # Per 64 decodes and 1,024 tokens, so that the three numbers have the same magnitude.
        features = np.array((1.0, num_decodes / 64, num_prefill_tokens / 1024))
        self._moments = self._moments * FORGETTING + np.outer(features, features)
        self._sums = self._sums * FORGETTING + features * seconds
        anchored = self._moments + np.eye(3) * ANCHOR
        self._costs = np.maximum(np.linalg.solve(anchored, self._sums + ANCHOR * self._costs), 0.0)

    def prefill_tokens(self, num_decodes: int) -> int:
        """Return the number of prompt tokens that the next step may have next to ``num_decodes`` decodes."""
        most = self._max_step_tokens - num_decodes
        per_token = self._costs[2] / 1024
        if not self._target_s or not num_decodes or per_token <= 0:
            return most
        left_s = self._target_s - self._costs[0] - self._costs[1] * num_decodes / 64
        return min(most, max(MIN_PREFILL_TOKENS, int(left_s / per_token)))
