"""The planner: which rows compute which tokens in the next step, and what a finished step means.

Owns: requests from their arrival to their end, and the steps in flight.  Does not know: tensors, text, actors.
Plans without token values: a step may be planned while the one before it still runs, so an EOS is noticed one
step late and the token sampled after it is dropped.  A row and its pages are reused only after the last step that
used them has completed.

The halves of a step are planned by ``Decodes`` and ``Prefills``; who holds which page is in ``PageManager``.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import add

import msgspec
import numpy as np

from engine.kv.events import KVEvent
from engine.kv.eviction import EvictionStrategy
from engine.kv.outline import Outline
from engine.messages import (
    Admit,
    Failed,
    Finish,
    LossExplained,
    Stats,
    Step,
    StepDone,
    StepExtras,
    Tokens,
)
from engine.scheduling.budget import StepBudget
from engine.scheduling.decodes import Decodes
from engine.scheduling.forecast import OutputForecast
from engine.scheduling.limits import PlannerLimits
from engine.scheduling.meter import Meter, StepRecord
from engine.scheduling.metrics import RequestMetrics
from engine.scheduling.pages import Appends, PageManager
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.prefills import Prefills, Segments
from engine.scheduling.quarantine import Quarantine
from engine.scheduling.queue import waiting_queue
from engine.scheduling.rows import Rows, RowTable
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a planned step will bring.  prefill_ends: how many tokens of each prefilling row are then computed."""

    sampled_rows: Rows
    num_decodes: int
    launched_at: float
    prefill_rows: tuple[int, ...] = ()
    prefill_ends: tuple[int, ...] = ()
    num_prefill_tokens: int = 0


class Planner:
    """Continuous batching over rows and pages.

    clock: seconds, for metrics and the adaptive budget; no other decision depends on it.  ``outbox`` collects what the
    tokenizer must hear, ``finished`` what observers may; whoever calls the planner empties them."""

    def __init__(
        self,
        limits: PlannerLimits,
        strategy: EvictionStrategy,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.outbox: list[Tokens | Failed] = []
        self.finished: list[RequestMetrics] = []
        self.meter = Meter(clock())
        self._limits = limits
        self._clock = clock
        self._rows = RowTable(limits.max_running, limits.max_len, limits.page_size)
        self._page_manager = PageManager(limits, self._rows, strategy)
        self._forecast = OutputForecast()
        self._budget = StepBudget(limits.max_step_tokens, limits.itl_target_s)
        self._decodes = Decodes(self._rows, self._page_manager)
        self._quarantine = Quarantine(waiting_queue(policy))
        self._prefills = Prefills(limits, self._rows, self._page_manager, self._quarantine, self._forecast)
        self._sequences: dict[int, Sequence] = {}
        self._ended: list[int] = []
        self._in_flight: deque[_InFlight] = deque()
        self._num_arrived = 0
        self._num_steps = 0
        self._last_completed = -1
        self._num_completed = 0
        self._completed_at_blame = 0
        self._open_since = 0.0

    # ---- requests come and go ---------------------------------------------------------------

    def admit(self, message: Admit) -> None:
        """Queue a request.  Raises RequestError if it could never run."""
        tokens = np.frombuffer(message.token_ids, dtype=np.int32)
        params = message.params
        stop_ids = () if params.ignore_eos else self._limits.eos_token_ids
        now = self._clock()
        if not self._sequences:
            self._open_since = now
        sequence = Sequence(
            request_id=message.request_id,
            arrival=self._num_arrived,
            priority=message.priority,
            params=params,
            tokens=tokens,
            num_prompt=len(tokens),
            max_total=self._limits.max_total(len(tokens), params.max_tokens),
            stop_ids=tuple(dict.fromkeys(stop_ids + params.stop_token_ids)),
            arrived_at=now,
            cache_salt=message.cache_salt,
        )
        self._num_arrived += 1
        self._prefills.wait(sequence)
        self._sequences[message.request_id] = sequence

    def abort(self, request_id: int, finish: Finish = Finish.ABORT) -> None:
        """End a request wherever it is; an unknown id (it ended already) is no error.  finish: what to call it."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        num_tokens = len(sequence.tokens)
        if sequence.row >= 0:
            num_tokens = int(self._rows.num_known[sequence.row])
            self._leave(sequence.row)
        else:
            self._prefills.forget(sequence)
        self._end(sequence, finish, num_tokens, self._clock())
        # An end without a token.
        self.outbox.append(
            Tokens(
                request_ids=np.array([request_id], dtype=np.int64).tobytes(),
                token_ids=np.array([-1], dtype=np.int32).tobytes(),
                finishes=bytes([finish]),
            )
        )

    def _end(self, sequence: Sequence, finish: Finish, num_tokens: int, now: float) -> None:
        """The one place where a request stops being known."""
        del self._sequences[sequence.request_id]
        self._quarantine.forget(sequence)
        num_output = num_tokens - sequence.num_prompt
        if finish in (Finish.STOP, Finish.LENGTH):
            self._forecast.note_end(num_output)
        first, arrived = sequence.first_token_at, sequence.arrived_at
        metrics = RequestMetrics(
            request_id=sequence.request_id,
            finish=finish,
            num_prompt_tokens=sequence.num_prompt,
            num_output_tokens=num_output,
            cached_tokens=max(0, sequence.num_cached_at_start),
            num_retractions=sequence.num_retractions,
            arrived_at=arrived,
            queue_s=sequence.started_at - arrived if sequence.started_at is not None else None,
            ttft_s=first - arrived if first is not None else None,
            tpot_s=(now - first) / (num_output - 1) if first is not None and num_output > 1 else None,
            e2e_s=now - arrived,
        )
        self.meter.ended(metrics)
        self.finished.append(metrics)

    # ---- planning ---------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """Plan one step: every decode row first, then prefill chunks within the token budget.  None: nothing to do."""
        if self._in_flight and self._quarantine.is_on:
            return None
        self._page_manager.tick(self._num_steps)
        while self._decodes.lack_pages() and self._retract_one():
            pass
        decode_rows, appends = self._decodes.plan()
        if self._prefills.may_go_on:
            segments = self._prefills.plan(self._budget.prefill_tokens(len(decode_rows)))
            if segments.rows:
                return self._launch_mixed(decode_rows, appends, segments)
        if not len(decode_rows):
            return None
        return self._launch(appends, _InFlight(decode_rows, len(decode_rows), self._clock()), decode_rows)

    def _launch_mixed(self, decode_rows: Rows, appends: Appends, segments: Segments) -> Step:
        """A step with prefills, whose last chunks decode from the next step on."""
        now = self._clock()
        for sequence in segments.started:
            if sequence.started_at is None:
                sequence.started_at = now
                self.meter.started(sequence.num_prompt, sequence.num_cached_at_start, now - sequence.arrived_at)
        rows = np.array(segments.rows, dtype=np.int32)
        samples = np.array(segments.samples, dtype=np.int32)
        first_rows = rows[samples == 1]
        for row in first_rows.tolist():
            if self._rows.num_planned[row] < self._rows.max_total[row]:
                self._decodes.join(row)
        record = _InFlight(
            np.concatenate((decode_rows, first_rows)),
            len(decode_rows),
            now,
            tuple(segments.rows),
            tuple(map(add, segments.starts, segments.lengths)),
            sum(segments.lengths),
        )
        step = self._launch(appends, record, decode_rows)
        self._rows.last_step[rows] = step.step_id
        return msgspec.structs.replace(
            step,
            admissions=tuple(segments.admissions),
            prefill_rows=rows.tobytes(),
            prefill_starts=np.array(segments.starts, dtype=np.int32).tobytes(),
            prefill_lengths=np.array(segments.lengths, dtype=np.int32).tobytes(),
            prefill_samples=samples.tobytes(),
        )

    def _launch(self, appends: Appends, record: _InFlight, decode_rows: Rows) -> Step:
        """Note a step as in flight; returns it without its prefills."""
        step_id = self._num_steps
        self._num_steps += 1
        self._rows.last_step[decode_rows] = step_id
        self._in_flight.append(record)
        if rewrites := self._page_manager.take_rewrites():
            every = [*rewrites, appends]
            appends = Appends(
                np.concatenate([one.rows for one in every]),
                np.concatenate([one.indexes for one in every]),
                np.concatenate([one.pages for one in every]),
            )
        step = Step(
            step_id=step_id,
            table_rows=appends.rows.tobytes(),
            table_indexes=appends.indexes.tobytes(),
            table_pages=appends.pages.tobytes(),
            decode_rows=decode_rows.tobytes(),
        )
        if transfers := self._page_manager.drain_transfers():
            directions = [np.full(len(one.host_pages), one.to_host, dtype=np.int32) for one in transfers]
            step = msgspec.structs.replace(
                step,
                transfer_to_host=np.concatenate(directions).tobytes(),
                transfer_device_pages=np.concatenate([one.device_pages for one in transfers]).tobytes(),
                transfer_host_pages=np.concatenate([one.host_pages for one in transfers]).tobytes(),
            )
        return step

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet completed."""
        return len(self._in_flight)

    # ---- completion -------------------------------------------------------------------------

    def complete(self, done: StepDone) -> None:
        """Take in a step's tokens: note them, end what ends, and free what no step uses any more."""
        record = self._in_flight.popleft()
        due = self._last_completed + 1
        assert done.step_id == due, f"step {done.step_id} completed, step {due} was due"
        self._last_completed = done.step_id
        self._num_completed += 1
        now = self._clock()
        began_at = max(record.launched_at, self.meter.last_completed_at)
        if self._budget.learns:
            self._budget.observe(record.num_decodes, record.num_prefill_tokens, now - began_at)
        rows = record.sampled_rows
        tokens = np.frombuffer(done.token_ids, dtype=np.int32)
        if self._ended:
            live = self._rows.running[rows]
            rows, tokens = rows[live], tokens[live]
        if len(tokens) and tokens.min() < 0:
            failed = tokens < 0
            self._fail_rows(rows[failed].tolist(), done.extras)
            rows, tokens = rows[~failed], tokens[~failed]
        extras = {int(self._rows.request_ids[row]): one for row, one in done.extras.items() if self._rows.running[row]}
        first = self._confirm_prefills(record) if record.prefill_rows else {}
        num_decodes, num_prefills = record.num_decodes, len(record.prefill_rows)
        step = StepRecord(done.step_id, began_at, now, num_decodes, num_prefills, record.num_prefill_tokens)
        self.meter.completed(step, len(rows) - len(first), len(first))
        if len(rows) or extras:
            self._commit(rows, tokens, first, extras)
        self._release_ended()
        if self._quarantine.is_on:
            self._release_suspect()

    def _confirm_prefills(self, record: _InFlight) -> dict[int, int]:
        """Share what the step's prefills have computed.

        Returns request id -> cached tokens of those whose first token this step has sampled."""
        table, first = self._rows, {}
        now = self._clock()
        for row, end in zip(record.prefill_rows, record.prefill_ends, strict=True):
            sequence = table.sequences[row]
            if sequence is None or not table.running[row]:
                continue
            table.num_confirmed[row] = end
            self._page_manager.publish(row, end)
            self._prefills.published(row, end)
            if end == sequence.num_prompt == len(sequence.tokens):
                first[sequence.request_id] = sequence.num_cached_at_start
                sequence.first_token_at = now
                self.meter.ttft_s.note(now - sequence.arrived_at)
        return first

    def _commit(self, rows: Rows, tokens: Rows, cached_tokens: dict[int, int], extras: dict[int, StepExtras]) -> None:
        table = self._rows
        known = table.num_known[rows]
        table.tokens[rows, known] = tokens
        known += 1
        table.num_known[rows] = known
        stopped = (table.stop_ids.take(rows, axis=1) == tokens).any(axis=0)
        full = known >= table.max_total.take(rows)
        ends = stopped | full
        some_end = ends.any()
        if some_end:
            finishes = full.view(np.uint8) * np.uint8(Finish.LENGTH)
            finishes[stopped] = Finish.STOP
        else:
            finishes = full.view(np.uint8)
        self.outbox.append(
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
        now = self._clock()
        for row, finish in zip(rows[ends].tolist(), finishes[ends].tolist(), strict=True):
            sequence = table.sequences[row]
            assert sequence is not None, f"row {row} sampled a token and is free"
            self._leave(row)
            self._end(sequence, Finish(finish), int(table.num_known[row]), now)

    def _fail_rows(self, rows: list[int], extras: dict[int, StepExtras]) -> None:
        """End rows that have no token."""
        for row in rows:
            reason = extras[row].failure if row in extras else ""
            sequence = self._rows.sequences[row]
            assert sequence is not None, f"row {row} sampled a token and is free"
            self._leave(row, share=False)
            self._end(sequence, Finish.ERROR, int(self._rows.num_known[row]), self._clock())
            self.outbox.append(
                Failed(
                    sequence.request_id,
                    reason or "the model's logits were not finite (NaN or infinity) for this request; it was ended",
                    status=400 if reason else 500,
                    code="grammar_failed" if reason else "nonfinite_logits",
                )
            )

    def _leave(self, row: int, *, share: bool = True) -> None:
        """Take a row out of the batch; its pages follow once no step in flight uses them.

        share: keep what completed steps have computed for others; not where it may be wrong."""
        table, sequence = self._rows, self._rows.sequences[row]
        if share and sequence is not None:
            # Once it has sampled, everything is computed but the last known token.
            self._page_manager.publish(row, self._num_done(row))
        self._prefills.leave(row)
        self._decodes.leave(row)
        table.running[row] = False
        self._ended.append(row)
        self._release_ended()

    def _release_ended(self) -> None:
        self._page_manager.collect(self._last_completed)
        if not self._ended:
            return
        still_used: list[int] = []
        for row in self._ended:
            if self._rows.last_step[row] <= self._last_completed:
                self._page_manager.release(row)
                self._prefills.unblock()
            else:
                still_used.append(row)
        self._ended = still_used

    def _retract_one(self) -> bool:
        """Send the least urgent, youngest running sequence back to the queue, keeping its tokens.

        False if only one is left: it fits alone, by the check at admission."""
        table = self._rows
        stays = np.flatnonzero(table.running & (table.num_planned < table.max_total)).tolist()
        running = [sequence for row in stays if (sequence := table.sequences[row]) is not None]
        if len(running) < 2:
            return False
        self._retract(max(running, key=lambda sequence: (sequence.priority, sequence.arrival)))
        self._forecast.note_retraction()
        return True

    def _retract(self, victim: Sequence) -> None:
        row, table = victim.row, self._rows
        self._leave(row)
        victim.tokens = table.tokens[row, : table.num_known[row]].copy()
        victim.row = -1
        victim.num_retractions += 1
        self._prefills.wait(victim)
        self.meter.num_retractions += 1

    def _release_suspect(self) -> None:
        """Once the sequence that runs alone is past the place where executors were lost, it makes room for the next."""
        alone = self._quarantine.alone
        if alone is not None and self._quarantine.passes(self._num_done(alone.row)) and self._quarantine.is_on:
            self._retract(alone)
        self._prefills.unblock()

    def _num_done(self, row: int) -> int:
        """Tokens of a row that completed steps have computed."""
        table, sequence = self._rows, self._rows.sequences[row]
        assert sequence is not None, f"row {row} is free"
        has_sampled = table.num_known[row] > len(sequence.tokens)
        return int(table.num_known[row]) - 1 if has_sampled else int(table.num_confirmed[row])

    def restart(self, *, is_fault: bool = True) -> LossExplained | None:
        """The device is a new one: steps in flight never come back, no page holds anything, whoever ran waits again.

        Everybody keeps the tokens they have, so that every stream goes on where it is.  is_fault: as in
        ``ExecutorsLost``.  Returns what explains the losses, if one request was found to bring them and has ended."""
        culprit = self._note_loss() if is_fault else None
        self._quarantine.begin()
        if not is_fault:
            self._quarantine.acquit_all()
        running = [sequence for sequence in self._sequences.values() if sequence.row >= 0]
        for sequence in running:
            sequence.tokens = self._rows.tokens[sequence.row, : self._rows.num_known[sequence.row]].copy()
            sequence.row = -1
        self._in_flight.clear()
        self._ended.clear()
        self._last_completed = self._num_steps - 1
        self._page_manager.forget()
        self._decodes.clear()
        self._prefills.clear()
        for sequence in running:
            if sequence is not culprit:
                self._prefills.wait(sequence)
        return self._end_culprit(culprit) if culprit is not None else None

    def _note_loss(self) -> Sequence | None:
        """Of every sequence in flight.  Returns the culprit, if there is one now."""
        culprit = None
        under_way = {row for record in self._in_flight for row in (*record.sampled_rows.tolist(), *record.prefill_rows)}
        for row in sorted(under_way):
            sequence = self._rows.sequences[row]
            if sequence is None or not self._rows.running[row]:
                continue
            if self._quarantine.note_loss(sequence, self._num_done(row), int(self._rows.num_computed[row])):
                culprit = sequence
        return culprit

    def _end_culprit(self, culprit: Sequence) -> LossExplained:
        num_losses = self._quarantine.num_losses(culprit)
        self._quarantine.acquit_all()
        self._end(culprit, Finish.ERROR, len(culprit.tokens), self._clock())
        self.outbox.append(
            Failed(
                culprit.request_id,
                f"this request ended the model's executors {num_losses} times in a row, at last while nothing else "
                "ran; it was ended so that other requests go on.  The server log says what happened; the same request "
                "is likely to fail again",
                status=500,
                code="executors_lost",
            )
        )
        works, self._completed_at_blame = self._num_completed > self._completed_at_blame, self._num_completed
        return LossExplained(num_losses, works)

    # ---- views ------------------------------------------------------------------------------

    @property
    def num_retractions(self) -> int:
        """How often somebody lost their row to others."""
        return self.meter.num_retractions

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    @property
    def num_host_pages_used(self) -> int:
        """Pages of the host tier that hold something."""
        return self._page_manager.num_on_host

    @property
    def due_since(self) -> float:
        """Since when a step's completion has been waited for, provided that requests are open."""
        return max(self._open_since, self.meter.last_completed_at)

    def outline(self, max_nodes: int) -> Outline:
        """The hottest part of the prefix cache."""
        return self._page_manager.outline(max_nodes)

    def drain_kv_events(self) -> list[KVEvent]:
        """What happened to cached pages since the last call; nothing unless ``limits.record_events``."""
        return self._page_manager.drain_events()

    def stats(self) -> Stats:
        """Gauges of this moment."""
        return Stats(
            step_id=self._last_completed,
            running=len(self._sequences) - self._prefills.num_waiting,
            waiting=self._prefills.num_waiting,
            pages_free=self._page_manager.num_free,
            pages_cached=self._page_manager.num_cached,
            pages_used=self._page_manager.num_used,
        )

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and no row runs ahead of its end."""
        self._page_manager.check()
        self._decodes.check()
