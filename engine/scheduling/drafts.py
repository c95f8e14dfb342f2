"""Speculation: rows that decode get proposed tokens behind their last one, and one step samples behind each of them.

Owns: each row's proposer session and its guess, which rows the device knows too far, when tokens are waited for.
Does not know: how a step is planned otherwise, what a token's end means.

A token is drawn by seed and position, and by the tokens before it.  So what is sampled behind a proposed token is what
decoding would sample, as long as every proposal before it was what was sampled there: those tokens stay, and the rest
is dropped.  Their keys and values lie behind the row's end, where nobody reads, until they are overwritten.

A row whose tokens are waited for has no step in flight, so steps do not overlap while somebody speculates.
A guess is kept and compared with the tokens as they come, whether steps verify it or not: what speculation would bring
is known before it begins, and text that nobody can guess is decoded as if there were no proposer.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from engine.messages import Step, StepExtras
from engine.params import SamplingParams
from engine.scheduling.completions import InFlight, Wave
from engine.scheduling.decodes import Decodes
from engine.scheduling.meter import Meter
from engine.scheduling.pages import PageManager
from engine.scheduling.payoff import Chance, HitRate, Payoff
from engine.scheduling.proposer import Proposer, ProposerSession
from engine.scheduling.rows import PlannerLimits, Rows, RowTable

log = logging.getLogger(__name__)

TOLD_AT_ONCE = 512  # tokens of a long prompt, so that other requests do not wait for its session


@dataclass(slots=True)
class _Line:
    """A row's session, None where it does not speculate.  guess: what may follow the ``num_told`` tokens."""

    session: ProposerSession | None
    num_told: int = 0
    guess: list[int] = field(default_factory=list)
    hit_rate: HitRate = field(default_factory=HitRate)


class Drafts:
    """Of one planner's rows.  await_tokens: nothing may be planned before every step in flight has completed."""

    def __init__(
        self,
        limits: PlannerLimits,
        table: RowTable,
        page_manager: PageManager,
        decodes: Decodes,
        meter: Meter,
        *,
        proposer: Proposer,
        vocab_size: int,
    ) -> None:
        self.await_tokens = False
        self._max_step_tokens = limits.max_step_tokens
        self._table = table
        self._page_manager = page_manager
        self._decodes = decodes
        self._meter = meter
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._payoff = Payoff()
        self._lines: dict[int, _Line] = {}
        # Rows of which the device counts more tokens as computed than are: their next step must say where it begins.
        self._overrun: set[int] = set()
        self._is_steady = False

    # ---- planning ---------------------------------------------------------------------------

    def added_to(self, step: Step, record: InFlight) -> tuple[Step, InFlight]:
        """A step that has just been planned, with nothing else in flight: with proposals for rows that decode in it."""
        decode_rows = np.frombuffer(step.decode_rows, dtype=np.int32)
        drafts = self._draft(decode_rows.tolist(), self._max_step_tokens - len(decode_rows) - record.num_prefill_tokens)
        self.await_tokens = any(drafts.values())
        self._overrun.difference_update(drafts)
        if not drafts:
            return step, record
        rows = np.array(list(drafts), dtype=np.int32)
        counts = np.array([len(proposed) for proposed in drafts.values()], dtype=np.int32)
        table = self._table
        starts = table.num_known[rows] - 1
        table.num_computed[rows] += counts
        table.num_planned[rows] += counts
        table_rows, table_indexes, table_pages = self._grow(rows)
        if self.await_tokens:
            self._decodes.recount()
        kept = decode_rows[~np.isin(decode_rows, rows)]
        # Position of each proposed token: behind its row's last known one.
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        step = msgspec.structs.replace(
            step,
            table_rows=step.table_rows + table_rows,
            table_indexes=step.table_indexes + table_indexes,
            table_pages=step.table_pages + table_pages,
            decode_rows=kept.tobytes(),
            prefill_rows=rows.tobytes() + step.prefill_rows,
            prefill_starts=starts.tobytes() + step.prefill_starts,
            prefill_lengths=(counts + 1).tobytes() + step.prefill_lengths,
            prefill_samples=(counts + 1).tobytes() + step.prefill_samples,
            proposed_rows=np.repeat(rows, counts).tobytes(),
            proposed_positions=(np.repeat(starts, counts) + 1 + nth).astype(np.int32).tobytes(),
            proposed_tokens=np.array([one for proposed in drafts.values() for one in proposed], np.int32).tobytes(),
        )
        sampled_rows = np.concatenate((kept, np.repeat(rows, counts + 1), record.sampled_rows[record.num_decodes :]))
        num_tokens = int(counts.sum()) + len(counts)
        return step, replace(
            record, sampled_rows=sampled_rows, num_decodes=len(kept), drafts=drafts, num_draft_tokens=num_tokens
        )

    def _draft(self, decode_rows: list[int], most: int) -> dict[int, tuple[int, ...]]:
        """Row -> proposals to verify; none for one that has only overrun."""
        lines = {row: line for row in decode_rows if (line := self._lines.get(row)) is not None and line.guess}
        chances = [Chance(line.hit_rate.share, self._room(row, line)) for row, line in lines.items()]
        counts = self._payoff.counts(chances, len(decode_rows), most)
        drafts: dict[int, tuple[int, ...]] = {row: () for row in decode_rows if row in self._overrun}
        for (row, line), count in zip(lines.items(), counts, strict=True):
            if count:
                drafts[row] = tuple(line.guess[:count])
        return drafts

    def _room(self, row: int, line: _Line) -> int:
        """How many proposals fit the row: its request, its pages, and others if pages are plenty."""
        table = self._table
        known = int(table.num_known[row])
        num = min(len(line.guess), int(table.max_total[row]) - known - 1)
        if self._page_manager.num_available <= len(self._decodes) * (2 + self._proposer.num_tokens):
            num = min(num, int(table.num_pages[row]) * table.page_size - known)
        return max(0, num)

    def _grow(self, rows: Rows) -> tuple[bytes, bytes, bytes]:
        """Pages for what the rows will have computed: the columns of the step."""
        table = self._table
        missing = np.maximum(-(-table.num_computed[rows] // table.page_size) - table.num_pages[rows], 0)
        pages = self._page_manager.allocate(int(missing.sum()))
        grown, indexes = np.repeat(rows, missing), np.zeros(len(pages), dtype=np.int32)
        for at, row in enumerate(grown.tolist()):
            indexes[at] = table.append_pages(np.array([row]), pages[at : at + 1])[0]
        return grown.tobytes(), indexes.tobytes(), pages.tobytes()

    # ---- completion -------------------------------------------------------------------------

    def verified(self, record: InFlight, sampled: Wave) -> list[Wave]:
        """What a step with proposals has sampled, as far as decoding would have sampled the same."""
        rows, tokens, extras = sampled
        places: list[list[int]] = [list(range(record.num_decodes))]
        later: list[dict[int, StepExtras]] = [dict(extras)]
        at = record.num_decodes
        for row, proposed in record.drafts.items():
            said = tokens[at : at + len(proposed)].tolist()
            num_right = next((nth for nth, one in enumerate(proposed) if said[nth] != one), len(proposed))
            first = extras.get(row, StepExtras())
            later[0][row] = msgspec.structs.replace(
                first, later_logprobs=(), num_proposed=len(proposed), num_accepted=num_right
            )
            for nth in range(num_right + 1):
                if nth == len(places):
                    places.append([])
                    later.append({})
                places[nth].append(at + nth)
                if nth and first.later_logprobs:
                    later[nth][row] = StepExtras(logprobs=first.later_logprobs[nth - 1])
            at += len(proposed) + 1
            if self._table.running[row]:
                self._meter.verified(len(proposed), num_right)
        places[0] += range(at, len(tokens))
        return [Wave(rows[place], tokens[place], of_row) for place, of_row in zip(places, later, strict=True)]

    def completed(self, record: InFlight, seconds: float) -> None:
        """A step's tokens have been taken in.  seconds: since the completion of the step before."""
        table = self._table
        for row, proposed in record.drafts.items():
            if proposed and table.running[row]:
                table.num_planned[row] = table.num_known[row]
                table.num_computed[row] = table.num_known[row] - 1
                self._overrun.add(row)
                self._decodes.recount()
        self._measure(record, seconds)
        for row in dict.fromkeys(record.sampled_rows.tolist()):
            if table.running[row]:
                self._tell(row)
        self.await_tokens = bool(self._overrun) or any(self._promised(self._decodes.rows.tolist()))

    def _measure(self, record: InFlight, seconds: float) -> None:
        num_proposed = sum(map(len, record.drafts.values()))
        num_rows = record.num_decodes + len(record.drafts)
        if num_proposed and not record.prefill_rows:
            self._payoff.note_verification(num_rows + num_proposed, num_rows, seconds)
        # The first step that overlaps with the one before it shows what steps cost that do.
        elif self._is_steady and not record.drafts and not record.prefill_rows:
            self._payoff.note_decode(num_rows, seconds)
        self._is_steady = not record.drafts and not record.prefill_rows

    def _promised(self, rows: Iterable[int]) -> list[int]:
        """What would be verified if the tokens in flight were known, and as guessed."""
        table = self._table
        chances, num_rows = [], 0
        for row in rows:
            num_rows += 1
            line = self._lines.get(row)
            if line is not None and line.guess:
                ahead = int(table.num_planned[row] - table.num_known[row])
                chances.append(Chance(line.hit_rate.share, self._room(row, line) - ahead, ahead))
        return self._payoff.counts(chances, num_rows, self._max_step_tokens - num_rows) if chances else []

    # ---- sessions ---------------------------------------------------------------------------

    def _tell(self, row: int) -> None:
        """The row has new tokens."""
        line = self._lines.get(row)
        if line is None:
            line = self._lines[row] = _Line(self._open(row))
        if line.session is None:
            return
        known = int(self._table.num_known[row])
        until = min(known, line.num_told + TOLD_AT_ONCE)
        tokens: list[int] = self._table.tokens[row, line.num_told : until].tolist()
        for token in tokens[: len(line.guess)]:
            is_hit = token == line.guess.pop(0)
            line.hit_rate.note(is_hit=is_hit)
            if not is_hit:
                line.guess.clear()
                break
        line.num_told = until
        try:
            line.session.extend(tokens)
            if until == known and not line.guess:
                line.guess = self._sane(line.session.propose(self._proposer.num_tokens))
        except BaseException:  # of a plugin, sys.exit as well, which would end the server
            log.exception("the proposer failed; its request goes on without it")
            line.session, line.guess = None, []

    def _open(self, row: int) -> ProposerSession | None:
        sequence = self._table.sequences[row]
        assert sequence is not None, f"row {row} is free"
        if not may_speculate(sequence.params):
            return None
        try:
            return self._proposer.open()
        except BaseException:  # as above
            log.exception("the proposer failed; a request goes on without it")
            return None

    def _sane(self, proposed: Sequence[int]) -> list[int]:
        """What the model could say of it."""
        tokens: list[int] = []
        for token in proposed[: self._proposer.num_tokens]:
            if not 0 <= token < self._vocab_size:
                break
            tokens.append(int(token))
        return tokens

    def leave(self, row: int) -> None:
        """The row ends, or goes back to the queue."""
        self._lines.pop(row, None)
        self._overrun.discard(row)

    def clear(self) -> None:
        """Nobody runs, and nothing is in flight."""
        self._lines.clear()
        self._overrun.clear()
        self.await_tokens = self._is_steady = False


def may_speculate(params: SamplingParams) -> bool:
    """Whether what is sampled at a position depends on the tokens before it through the model alone."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    limits = params.grammar or params.limits_tokens or params.logits_processors
    return penalties == (1.0, 0.0, 0.0) and not limits and not params.pooling and not params.logprob_token_ids
