"""The planner: which rows compute which tokens in the next step, and what a finished step means.

Owns: the queue, the rows, the pages, and each request's end.  Does not know: tensors, text, clocks, actors.
Plans without token values: a step may be planned while the one before it still runs, so an EOS is noticed one
step late and the token sampled after it is dropped.  A row and its pages are reused only after the last step that
used them has completed.
"""

from collections import deque
from dataclasses import dataclass, field
from operator import add

import msgspec
import numpy as np

from engine.kv.eviction import EvictionStrategy
from engine.messages import Admission, Admit, Failed, Finish, Logprobs, Stats, Step, StepDone, Tokens
from engine.scheduling.holdings import NO_APPENDS, NO_ROWS, Appends, Holdings
from engine.scheduling.limits import PlannerLimits
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.rows import Rows, RowTable
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a planned step will bring.  prefill_ends: how many tokens of each prefilling row are then computed."""

    sampled_rows: Rows
    prefill_rows: tuple[int, ...] = ()
    prefill_ends: tuple[int, ...] = ()


@dataclass(slots=True)
class _Prefills:
    """The prefill half of a step while it is being planned."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)


# How many waiting requests a step looks past, and what a shared prefix must save to be waited for.
MOST_PUT_OFF = 32
WORTH_WAITING_TOKENS = 32


class Planner:
    """Continuous batching over rows and pages.  ``outbox`` collects what the tokenizer must hear."""

    def __init__(self, limits: PlannerLimits, strategy: EvictionStrategy) -> None:
        self.outbox: list[Tokens | Failed] = []
        self._limits = limits
        self._rows = RowTable(limits.max_running, limits.max_len, limits.page_size)
        self._holdings = Holdings(limits.num_pages, limits.page_size, self._rows, strategy)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._prefilling: list[int] = []
        self._unpublished: list[int] = []
        self._decoding: Rows = NO_ROWS
        self._quiet_steps = 0
        self._ended: list[int] = []
        self._in_flight: deque[_InFlight] = deque()
        self._num_arrived = 0
        self._num_steps = 0
        self._last_completed = -1
        self.num_retractions = 0

    # ---- requests come and go ---------------------------------------------------------------

    def admit(self, message: Admit) -> None:
        """Queue a request.  Raises RequestError if it could never run."""
        tokens = np.frombuffer(message.token_ids, dtype=np.int32)
        params = message.params
        stop_ids = () if params.ignore_eos else self._limits.eos_token_ids
        sequence = Sequence(
            request_id=message.request_id,
            arrival=self._num_arrived,
            priority=message.priority,
            params=params,
            tokens=tokens,
            num_prompt=len(tokens),
            max_total=self._limits.max_total(len(tokens), params.max_tokens),
            stop_ids=tuple(dict.fromkeys(stop_ids + params.stop_token_ids)),
            cache_salt=message.cache_salt,
        )
        self._num_arrived += 1
        self._sequences[message.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; an unknown id (it ended already) is no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end_early(sequence)
            self._say(request_id, Finish.ABORT)

    def _end_early(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._leave(sequence.row)
        else:
            self._waiting.remove(sequence)
        del self._sequences[sequence.request_id]

    def _say(self, request_id: int, finish: Finish) -> None:
        """An end without a token."""
        self.outbox.append(
            Tokens(
                request_ids=np.array([request_id], dtype=np.int64).tobytes(),
                token_ids=np.array([-1], dtype=np.int32).tobytes(),
                finishes=bytes([finish]),
            )
        )

    # ---- planning ---------------------------------------------------------------------------

    def next_step(self) -> Step | None:
        """Plan one step: every decode row first, then prefill chunks within the token budget.  None: nothing to do."""
        self._holdings.tick(self._num_steps)
        decode_rows, appends = self._plan_decodes()
        prefills = None
        if self._prefilling or self._waiting:
            prefills = self._plan_prefills(self._limits.max_step_tokens - len(decode_rows))
        if prefills is None or not prefills.rows:
            return self._launch(decode_rows, appends, _InFlight(decode_rows)) if len(decode_rows) else None
        rows = np.array(prefills.rows, dtype=np.int32)
        samples = np.array(prefills.samples, dtype=np.int32)
        sampled = np.concatenate((decode_rows, rows[samples == 1]))
        record = _InFlight(sampled, tuple(prefills.rows), tuple(map(add, prefills.starts, prefills.lengths)))
        step = self._launch(decode_rows, appends, record)
        self._rows.last_step[rows] = step.step_id
        return msgspec.structs.replace(
            step,
            admissions=tuple(prefills.admissions),
            prefill_rows=rows.tobytes(),
            prefill_starts=np.array(prefills.starts, dtype=np.int32).tobytes(),
            prefill_lengths=np.array(prefills.lengths, dtype=np.int32).tobytes(),
            prefill_samples=samples.tobytes(),
        )

    def _launch(self, decode_rows: Rows, appends: Appends, record: _InFlight) -> Step:
        """Note a step as in flight; returns it without its prefills."""
        step_id = self._num_steps
        self._num_steps += 1
        self._rows.last_step[decode_rows] = step_id
        self._in_flight.append(record)
        if rewrites := self._holdings.take_rewrites():
            every = [*rewrites, appends]
            appends = Appends(
                np.concatenate([one.rows for one in every]),
                np.concatenate([one.indexes for one in every]),
                np.concatenate([one.pages for one in every]),
            )
        return Step(
            step_id=step_id,
            append_rows=appends.rows.tobytes(),
            append_indexes=appends.indexes.tobytes(),
            append_pages=appends.pages.tobytes(),
            decode_rows=decode_rows.tobytes(),
        )

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet completed."""
        return len(self._in_flight)

    def _plan_decodes(self) -> tuple[Rows, Appends]:
        """Rows that decode, and the pages appended for those that cross into a new one."""
        table = self._rows
        if self._quiet_steps > 0:
            # Nobody joined, and nobody needs a page or reaches its length: two additions are the whole plan.
            self._quiet_steps -= 1
            rows = self._decoding
            table.computed[rows] += 1
            table.planned[rows] += 1
            return rows, NO_APPENDS
        needy = self._needy_rows()
        appends = NO_APPENDS
        rows = self._decoding
        if len(needy):
            served = needy[: self._holdings.num_available]
            pages = self._holdings.allocate(len(served))
            appends = Appends(served, table.append_pages(served, pages), pages)
            if len(served) < len(needy):
                # The others sit this step out: pages are on their way back from rows that still run.
                rows = rows[~np.isin(rows, needy[len(served) :])]
        table.computed[rows] += 1
        table.planned[rows] += 1
        full = table.planned[rows] == table.max_total[rows]
        if full.any():
            self._set_decoding(self._decoding[~np.isin(self._decoding, rows[full])])
        self._quiet_steps = self._count_quiet_steps()
        return rows, appends

    def _count_quiet_steps(self) -> int:
        """How many steps until a decoding row needs a page or samples its last token."""
        rows, table = self._decoding, self._rows
        if not len(rows):
            return 0
        until_page = table.num_pages[rows] * table.page_size - table.computed[rows]
        until_end = table.max_total[rows] - table.planned[rows] - 1
        return int(min(until_page.min(), until_end.min()))

    def _set_decoding(self, rows: Rows) -> None:
        """Change who decodes.  Arrays are replaced, never changed: steps in flight refer to them."""
        self._decoding = rows
        self._quiet_steps = 0

    def _needy_rows(self) -> Rows:
        """Decode rows whose next position lies in a page they do not have yet; retracts others to serve them."""
        table = self._rows
        while True:
            rows = self._decoding
            needy = rows[table.computed[rows] >= table.num_pages[rows] * table.page_size]
            available = self._holdings.num_available
            if len(needy) <= available:
                return needy
            if len(needy) <= available + self._pages_coming_back() or not self._retract_one():
                return needy

    def _pages_coming_back(self) -> int:
        """Pages of rows that only wait for a step in flight: ended, or with their last token being sampled."""
        table = self._rows
        taken = np.array([sequence is not None for sequence in table.sequences])
        return int(table.num_pages[taken & (table.ended | (table.planned == table.max_total))].sum())

    def _plan_prefills(self, budget: int) -> _Prefills:
        """Chunks of the prompts under way, then of waiting requests as rows and pages allow."""
        prefills = _Prefills()
        for row in list(self._prefilling):
            if budget <= 0:
                return prefills
            budget -= self._plan_chunk(prefills, row, budget)
        put_off: list[Sequence] = []
        while budget > 0 and self._rows.num_free and (sequence := self._waiting.first()) is not None:
            if len(put_off) < MOST_PUT_OFF and self._is_being_computed(sequence):
                put_off.append(self._waiting.pop())
                continue
            # Every row that runs may want a page soon: admitting into the last ones would only cause retractions.
            reserve = len(self._decoding) + len(self._prefilling)
            started = self._holdings.start(sequence, reserve)
            if started is None:
                break
            self._waiting.pop()
            self._prefilling.append(started)
            self._unpublished.append(started)
            prefills.admissions.append(self._admission(sequence))
            budget -= self._plan_chunk(prefills, started, budget)
        for sequence in put_off:
            self._waiting.push(sequence)
        return prefills

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running prefill will soon share more of the sequence's prefix than is cached now.

        Then it waits a step or two and finds the pages, instead of computing them a second time beside the first."""
        if not self._unpublished:
            return False
        page_size, table = self._limits.page_size, self._rows
        end = self._holdings.num_cached_pages(sequence) * page_size + max(page_size, WORTH_WAITING_TOKENS)
        if end >= len(sequence.tokens):
            return False
        return any(
            table.known[row] > end
            and other.cache_salt == sequence.cache_salt
            and np.array_equal(table.tokens[row, :end], sequence.tokens[:end])
            for row in self._unpublished
            if (other := table.sequences[row]) is not None
        )

    def _admission(self, sequence: Sequence) -> Admission:
        table, row = self._rows, sequence.row
        num_computed = int(table.computed[row])
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = num_computed
        return Admission(
            row=row,
            token_ids=sequence.tokens.tobytes(),
            num_prompt_tokens=sequence.num_prompt,
            num_computed_tokens=num_computed,
            pages=table.page_table[row, : table.num_pages[row]].tobytes(),
            params=sequence.params,
        )

    def _plan_chunk(self, prefills: _Prefills, row: int, budget: int) -> int:
        """Plan the next chunk of a row's prompt; returns its length.  The last chunk samples and joins the decodes."""
        table = self._rows
        start, known = int(table.computed[row]), int(table.known[row])
        length = min(known - start, self._limits.prefill_chunk, budget)
        ends = start + length == known
        prefills.rows.append(row)
        prefills.starts.append(start)
        prefills.lengths.append(length)
        prefills.samples.append(int(ends))
        table.computed[row] = start + length
        if ends:
            table.planned[row] = known + 1
            self._prefilling.remove(row)
            if known + 1 < table.max_total[row]:
                self._set_decoding(np.append(self._decoding, np.int32(row)))
        return length

    # ---- completion -------------------------------------------------------------------------

    def complete(self, done: StepDone) -> None:
        """Take in a step's tokens: note them, end what ends, and free what no step uses any more."""
        record = self._in_flight.popleft()
        due = self._last_completed + 1
        assert done.step_id == due, f"step {done.step_id} completed, step {due} was due"
        self._last_completed = done.step_id
        rows = record.sampled_rows
        tokens = np.frombuffer(done.token_ids, dtype=np.int32)
        logprobs = done.logprobs
        if self._ended:
            live = ~self._rows.ended[rows]
            logprobs = _reindexed(logprobs, live)
            rows, tokens = rows[live], tokens[live]
        if len(tokens) and tokens.min() < 0:
            self._fail_rows(rows[tokens < 0])
            logprobs = _reindexed(logprobs, tokens >= 0)
            rows, tokens = rows[tokens >= 0], tokens[tokens >= 0]
        first = self._confirm_prefills(record) if record.prefill_rows else {}
        if len(rows):
            self._commit(rows, tokens, logprobs, first)
        self._release_ended()

    def _confirm_prefills(self, record: _InFlight) -> dict[int, int]:
        """Share what the step's prefills have computed.

        Returns request id -> cached tokens of those whose first token this step has sampled."""
        table, first = self._rows, {}
        for row, end in zip(record.prefill_rows, record.prefill_ends, strict=True):
            sequence = table.sequences[row]
            if sequence is None or table.ended[row]:
                continue
            table.confirmed[row] = end
            self._holdings.publish(row, end)
            if end == len(sequence.tokens):
                self._unpublished.remove(row)
                if end == sequence.num_prompt:
                    first[sequence.request_id] = sequence.cached_tokens
        return first

    def _commit(self, rows: Rows, tokens: Rows, logprobs: dict[int, Logprobs], cached_tokens: dict[int, int]) -> None:
        table = self._rows
        known = table.known[rows]
        table.tokens[rows, known] = tokens
        known += 1
        table.known[rows] = known
        stopped = (table.stop_ids[rows] == tokens[:, None]).any(axis=1)
        full = known >= table.max_total[rows]
        finishes = full.view(np.uint8) * np.uint8(Finish.LENGTH)
        ends = stopped | full
        finishes[stopped] = Finish.STOP
        self.outbox.append(
            Tokens(
                request_ids=table.request_ids[rows].tobytes(),
                token_ids=tokens.tobytes(),
                finishes=finishes.tobytes(),
                cached_tokens=cached_tokens,
                logprobs=logprobs,
            )
        )
        for row in rows[ends].tolist():
            del self._sequences[int(table.request_ids[row])]
            self._leave(row)

    def _fail_rows(self, rows: Rows) -> None:
        for row in rows.tolist():
            request_id = int(self._rows.request_ids[row])
            del self._sequences[request_id]
            self._leave(row, share=False)
            self.outbox.append(
                Failed(
                    request_id,
                    "the model's logits were not finite (NaN or infinity) for this request; it was ended",
                    status=500,
                    code="nonfinite_logits",
                )
            )

    def _leave(self, row: int, *, share: bool = True) -> None:
        """Take a row out of the batch; its pages follow once no step in flight uses them.

        share: keep what completed steps have computed for others; not where it may be wrong."""
        table, sequence = self._rows, self._rows.sequences[row]
        if share and sequence is not None:
            # Once it has sampled, everything is computed but the last known token.
            has_sampled = table.known[row] > len(sequence.tokens)
            self._holdings.publish(row, int(table.known[row]) - 1 if has_sampled else int(table.confirmed[row]))
        table.ended[row] = True
        if row in self._unpublished:
            self._unpublished.remove(row)
        self._ended.append(row)
        if row in self._prefilling:
            self._prefilling.remove(row)
        else:
            self._set_decoding(self._decoding[self._decoding != row])
        self._release_ended()

    def _release_ended(self) -> None:
        self._holdings.collect(self._last_completed)
        if not self._ended:
            return
        still_used: list[int] = []
        for row in self._ended:
            if self._rows.last_step[row] <= self._last_completed:
                self._holdings.release(row)
            else:
                still_used.append(row)
        self._ended = still_used

    def _retract_one(self) -> bool:
        """Send the least urgent, youngest running sequence back to the queue, keeping its tokens.

        False if only one is left: it fits alone, by the check at admission."""
        table = self._rows
        stays = ~table.ended & (table.planned < table.max_total)
        running = [sequence for row, sequence in enumerate(table.sequences) if sequence and stays[row]]
        if len(running) < 2:
            return False
        victim = max(running, key=lambda sequence: sequence.rank_in_queue)
        row = victim.row
        self._leave(row)
        victim.tokens = table.tokens[row, : table.known[row]].copy()
        victim.row = -1
        self._waiting.push(victim)
        self.num_retractions += 1
        return True

    # ---- views ------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    def stats(self) -> Stats:
        """Gauges of this moment."""
        return Stats(
            step_id=self._last_completed,
            running=len(self._sequences) - len(self._waiting),
            waiting=len(self._waiting),
            pages_free=self._holdings.num_free,
            pages_cached=self._holdings.num_cached,
            pages_used=self._holdings.num_used,
        )

    def check(self) -> None:
        """Raise AssertionError unless every page is free or held by exactly one row."""
        self._holdings.check()
        table = self._rows
        for row in self._decoding.tolist():
            assert not table.ended[row], f"row {row} decodes after its end"
            assert table.computed[row] < table.planned[row] <= table.max_total[row], f"row {row} ran ahead"


def _reindexed(logprobs: dict[int, Logprobs], keep: np.ndarray) -> dict[int, Logprobs]:
    """Renumber lines after dropping those where ``keep`` is False."""
    if not logprobs:
        return logprobs
    new_index = np.cumsum(keep) - 1
    return {int(new_index[index]): entry for index, entry in logprobs.items() if keep[index]}
