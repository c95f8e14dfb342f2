"""The completion of a step: tokens are noted, requests end, and rows and pages come back.

Owns: the steps in flight, and rows that have ended and that one of them still uses.
Does not know: queues, text, what the next step is.  A row and its pages are reused only after the last step that used
them has completed.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from engine.messages import RULED_OUT, Failed, Finish, StepDone, StepExtras, Tokens
from engine.scheduling.feature import PlannerParts
from engine.scheduling.meter import StepRecord
from engine.scheduling.rows import Rows, Sequence, TokenIds
from engine.scheduling.step_builder import InFlight, Wave
from engine.types.errors import RequestError


class Completions:
    """The steps in flight, oldest first, and the work that is done as each of them completes.

    last_completed: id of the last completed step.  num_completed: number of completed steps."""

    def __init__(self, parts: PlannerParts) -> None:
        self.in_flight: deque[InFlight] = deque()
        self.last_completed = -1
        self.num_completed = 0
        self._table = parts.table
        self._page_manager = parts.pages
        self._decodes = parts.decodes
        self._prefills = parts.prefills
        self._requests = parts.requests
        self._clock = parts.clock
        self._features = parts.features
        self._events = parts.events
        self._ended: list[int] = []

    def forget(self, last_launched: int) -> None:
        """Forget the steps in flight, which never complete, and the rows that wait for them."""
        self.in_flight.clear()
        self._ended.clear()
        self.last_completed = last_launched

    def complete(self, done: StepDone) -> None:
        """Take in the tokens of a step: note them, end requests that are done, free what no step uses any more."""
        record = self.in_flight.popleft()
        due = self.last_completed + 1
        assert done.step_id == due, f"step {done.step_id} completed, step {due} was due"
        self.last_completed = done.step_id
        self.num_completed += 1
        now = self._clock()
        completed_before = self._requests.meter.last_completed_at
        some_ended = bool(self._ended)
        for name, part in done.parts.items():
            if (take := self._features.take.get(name)) is not None:
                some_ended |= take(part, done)
        waves = [Wave(record.sampled_rows, np.frombuffer(done.token_ids, dtype=np.int32), done.extras)]
        if record.notes:
            for split in self._features.waves:
                waves = [part for wave in waves for part in split(record, wave)]
        rows, tokens, extras = self._keep_valid(waves[0], some_ended=some_ended)
        first = self._confirm_prefills(record) if record.prefill_rows else {}
        self._note_completed(record, done, max(record.launched_at, completed_before), now, len(rows), len(first))
        if len(rows) or extras:
            self._commit(rows, tokens, first, extras)
        for wave in waves[1:]:
            rows, tokens, extras = self._keep_valid(wave, some_ended=True)
            self._requests.meter.followed(len(rows))
            self._commit(rows, tokens, {}, extras)
        for completed in self._features.completed:
            completed(record, now - completed_before)
        self._release_ended()

    def _note_completed(
        self, record: InFlight, done: StepDone, began_at: float, now: float, num_sampled: int, num_first: int
    ) -> None:
        step = StepRecord(
            step_id=done.step_id,
            began_at=began_at,
            completed_at=now,
            num_decodes=record.num_decodes + record.num_extra_tokens,
            num_prefills=len(record.prefill_rows),
            num_prefill_tokens=record.num_prefill_tokens,
            num_next=num_sampled - num_first,
            num_first=num_first,
            note=done.note,
            num_copied=record.num_copied,
        )
        for completed in self._events.completed:
            completed(step)

    def _keep_valid(self, wave: Wave, *, some_ended: bool) -> tuple[Rows, TokenIds, dict[int, StepExtras]]:
        """Return the rows of a wave that still run and have a token, their tokens, and the extras by request id.

        A row without a token ends."""
        ids, running = self._table.request_ids, self._table.running
        rows, tokens, by_row = wave
        if some_ended:
            live = running[rows]
            rows, tokens = rows[live], tokens[live]
        if len(tokens) and np.minimum.reduce(tokens) < 0:
            failed = tokens < 0
            self._fail_rows(rows[failed], tokens[failed], by_row)
            rows, tokens = rows[~failed], tokens[~failed]
        return rows, tokens, {int(ids[row]): one for row, one in by_row.items() if running[row]}

    def _confirm_prefills(self, record: InFlight) -> dict[int, tuple[int, int]]:
        """Share the pages that the step's prefills have computed.

        Return request id -> prompt tokens found in the cache, and put there, of requests whose first token this step
        has sampled."""
        table, first = self._table, {}
        now = self._clock()
        for row, end in zip(record.prefill_rows, record.prefill_ends, strict=True):
            sequence = table.sequences[row]
            if sequence is None or not table.running[row]:
                continue
            for computed in self._events.computed:
                computed(sequence, self.last_completed, int(end - table.num_confirmed[row]))
            table.num_confirmed[row] = end
            num_before = self._page_manager.tree.num_cached
            self._page_manager.publish(row, end)
            sequence.num_created += self._page_manager.tree.num_cached - num_before
            for published in self._features.published:
                published(row, end)
            self._prefills.unblock()
            if end == len(sequence.tokens):
                for decodes in self._events.decodes:
                    decodes(sequence)
            if end == sequence.num_prompt == len(sequence.tokens):
                # Pages that were evicted from a retracted prompt were put there twice.
                num_rest = sequence.num_prompt - sequence.num_cached_at_start
                num_created = min(sequence.num_created * table.page_size, num_rest)
                first[sequence.request_id] = sequence.num_cached_at_start, num_created
                sequence.first_token_at = now
                for first_token in self._events.first_token:
                    first_token(sequence, now)
        return first

    def _commit(
        self, rows: Rows, tokens: Rows, cached_tokens: dict[int, tuple[int, int]], extras: dict[int, StepExtras]
    ) -> None:
        table = self._table
        known = table.num_known[rows]
        table.tokens[rows, known] = tokens
        known += 1
        table.num_known[rows] = known
        stops = table.stop_ids.take(rows, axis=1) == tokens
        full = known >= table.max_total.take(rows)
        finishes = full.view(np.uint8)
        some_end = np.count_nonzero(stops) or np.count_nonzero(full)
        if some_end:
            finishes = finishes * np.uint8(Finish.LENGTH)
            finishes[stops.any(axis=0)] = Finish.STOP
        self._requests.outbox.append(
            Tokens(
                request_ids=table.request_ids[rows].tobytes(),
                token_ids=tokens.tobytes(),
                finishes=finishes.tobytes(),
                cached_tokens=cached_tokens,
                extras=extras,
            )
        )
        if not some_end:
            return
        ends = finishes != Finish.RUNNING
        for row, finish in zip(rows[ends].tolist(), finishes[ends].tolist(), strict=True):
            self.end(row, Finish(finish))

    def _fail_rows(self, rows: Rows, tokens: TokenIds, extras: Mapping[int, StepExtras]) -> None:
        """End rows that have no token.  tokens: the values of ``StepDone`` in place of tokens."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            status, code = 400, "grammar_failed"
            reason = extras[row].failure if row in extras else ""
            if not reason and token == RULED_OUT:
                code = "no_token_left"
                reason = "the logits_processors of this request allow no token, so it was ended"
            elif not reason:
                status, code = 500, "nonfinite_logits"
                reason = "the model's logits were not finite (NaN or infinity) for this request; it was ended"
            self.fail(row, RequestError(reason, status=status, code=code))

    def fail(self, row: int, error: RequestError) -> None:
        """End a request with an error.  Its computed tokens may be wrong, so they are not shared."""
        request_id = int(self._table.request_ids[row])
        self.end(row, Finish.ERROR, share=False)
        self._requests.outbox.append(Failed.of(request_id, error))

    def end(self, row: int, finish: Finish, *, share: bool = True) -> None:
        """End the request that has this row.  share: as in ``leave``."""
        sequence = self._table.sequences[row]
        assert sequence is not None, f"row {row} ends and is free"
        self.leave(row, share=share)
        sequence.tokens = self._table.tokens[row, : self._table.num_known[row]]  # until another sequence has the row
        self._requests.end(sequence, finish, len(sequence.tokens))

    def leave(self, row: int, *, share: bool = True) -> None:
        """Take a row out of the batch; its pages follow when no step in flight uses them.

        share: keep the results of completed steps for other requests; False if they may be wrong."""
        table, sequence = self._table, self._table.sequences[row]
        if share and sequence is not None:
            # A row that has sampled has K/V for all its tokens but the last known one.
            self._page_manager.publish(row, self.num_done(row))
        self._prefills.leave(row)
        self._decodes.leave(row)
        for left in self._features.left:
            left(row)
        table.running[row] = False
        self._ended.append(row)
        self._release_ended()

    def retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, with its tokens."""
        row, table = sequence.row, self._table
        self.leave(row)
        sequence.tokens = table.tokens[row, : table.num_known[row]].copy()
        sequence.row = -1
        self._requests.retracted(sequence)
        self._prefills.wait(sequence)

    def _release_ended(self) -> None:
        self._page_manager.collect(self.last_completed)
        if not self._ended:
            return
        still_used: list[int] = []
        for row in self._ended:
            if self._table.last_step[row] <= self.last_completed:
                self._page_manager.release(row)
                self._prefills.unblock()
            else:
                still_used.append(row)
        self._ended = still_used

    def num_done(self, row: int) -> int:
        """Return the number of a row's tokens that completed steps have computed."""
        table, sequence = self._table, self._table.sequences[row]
        assert sequence is not None, f"row {row} is free"
        has_sampled = table.num_known[row] > len(sequence.tokens)
        return int(table.num_known[row]) - 1 if has_sampled else int(table.num_confirmed[row])
