"""The prefill half of a step: which sequences start, and how many tokens of which prompt are computed.

Owns: prompts under way and their turns.
Does not know: decodes' pages, what a finished step means.
Prompts take turns, a chunk each, and the waiting queue takes a turn like a prompt: so a long prompt cannot keep
short ones waiting, and a stream of short ones cannot keep a long one from going on.
"""

from collections import deque

from engine.messages import Admission
from engine.scheduling.events import Why
from engine.scheduling.feature import PlannerParts
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.requests import OutputForecast
from engine.scheduling.rows import PlannerLimits, Sequence
from engine.scheduling.step_builder import Segments

QUEUE = -1  # stands for the waiting queue among the rows that take turns


class Prefills:
    """Rows between their first step and their first token.  queue: sequences without a row."""

    def __init__(self, parts: PlannerParts, queue: WaitingQueue, forecast: OutputForecast) -> None:
        self.queue = queue
        self._forecast = forecast
        self._limits = parts.limits
        self._table = parts.table
        self._page_manager = parts.pages
        self._features = parts.features
        self._events = parts.events
        self._turns: deque[int] = deque([QUEUE])
        self._blocked = False

    def retune(self, limits: PlannerLimits) -> None:
        """Use another prefill chunk from now on."""
        self._limits = limits

    def __len__(self) -> int:
        """Number of prompts under way."""
        return len(self._turns) - 1

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a row."""
        num_held: int = sum(num_held() for num_held in self._features.num_held)
        return len(self.queue) + num_held

    @property
    def may_go_on(self) -> bool:
        """Whether ``plan`` may find something to do."""
        return len(self._turns) > 1 or self._may_start

    @property
    def _may_start(self) -> bool:
        if self._blocked or not len(self.queue) or not self._table.num_free:
            return False
        return not any(blocks() for blocks in self._features.blocks)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that needs a row."""
        self.queue.push(sequence)
        self._note_wait(sequence, "queue")
        self._blocked = False

    def _note_wait(self, sequence: Sequence, why: Why) -> None:
        for waits in self._events.waits:
            waits(sequence, why)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that waits."""
        held = [forget(sequence) for forget in self._features.forget]  # each: one may hold it, another one its pages
        if not any(held):
            self.queue.remove(sequence)

    def clear(self) -> None:
        """Forget every prompt under way.  Sequences that features hold are queued like all others."""
        self._turns = deque([QUEUE])
        for sequence in self._features.reset():
            self.wait(sequence)
        self._blocked = False

    def unblock(self) -> None:
        """Try again to start the first sequence, for which there was no room."""
        self._blocked = False

    def leave(self, row: int) -> None:
        """End the row's prompt; harmless if it is not under way."""
        if row in self._turns:
            self._turns.remove(row)

    # ---- planning ---------------------------------------------------------------------------

    def plan(self, num_decodes: int) -> Segments:
        """Plan the prompts of a step within the budget that so many decodes leave.

        Each prompt and the queue get a chunk in their turn; the rest goes to new sequences.  Without decodes, what is
        left after that lengthens the prompts of the step; with decodes it would delay their tokens.  A row whose last
        chunk is in the step takes no more turns: its first token will be sampled."""
        segments, budget = Segments(), self._limits.max_step_tokens - num_decodes
        for prefill_tokens in self._features.prefill_tokens:
            budget = prefill_tokens(num_decodes, budget)
        if self._may_start:
            self.queue.rerank(self._page_manager.num_cached_tokens)
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
            if budget < 1 or segments.samples[index] or sequence is None or sequence.params.prompt_logprobs is not None:
                continue
            budget -= self._lengthen(segments, index, min(int(table.num_known[row] - table.num_computed[row]), budget))

    def _start_some(self, segments: Segments, budget: int, turn: int) -> int:
        """Give rows to waiting sequences, and add their first chunks.  Return the number of tokens in these.

        It goes on while rows, pages and ``budget`` allow, but starts no sequence once ``turn`` tokens are used."""
        used = 0
        holds = self._features.hold if self.queue.lets_wait() else ()
        while used < min(turn, budget) and self._may_start and (sequence := self.queue.first()) is not None:
            if why := next(filter(None, (hold(sequence) for hold in holds)), None):
                self.queue.pop(starts=False)
                self._note_wait(sequence, why)
                continue
            num_available = self._page_manager.num_available
            row = self._page_manager.start(sequence, self._forecast.reserve(self._table, sequence, num_available))
            if row is None:
                self._blocked = True
                self._note_wait(sequence, "no_room")
                break
            self.queue.pop(starts=True)
            self._turns.append(row)  # after all rows that have not had their turn yet
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
        return self._lengthen(segments, len(segments.rows) - 1, length)

    def _lengthen(self, segments: Segments, index: int, more: int) -> int:
        """Compute at most ``more`` tokens more of a row that is in the step.  Return their number."""
        table, row = self._table, segments.rows[index]
        for chunk_tokens in self._features.chunk_tokens:
            more = chunk_tokens(row, more)
        segments.lengths[index] += more
        table.num_computed[row] += more
        if table.num_computed[row] == table.num_known[row]:
            segments.samples[index] = 1
            table.num_planned[row] = table.num_known[row] + 1
            self._turns.remove(row)
        return more

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
