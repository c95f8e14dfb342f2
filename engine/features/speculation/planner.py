"""Speculation in the planner: rows that decode get proposed tokens, and one step verifies all of a row.

Owns: how many guesses of which row a step verifies, rows for which the device counts too many tokens, when to wait.
Does not know: where guesses come from, how a step is planned otherwise, what a token's end means.

A token is drawn by seed and position, and by the tokens before it.  So a token that is sampled after a proposed one is
the one that decoding would sample, as long as every proposal before it equals the token sampled there: those tokens
stay, and the rest is dropped.  Their keys and values lie after the row's end, where nothing reads, until they are
overwritten.

A row whose tokens are waited for has no step in flight, unless the ranks count by themselves how many tokens were right
(``overlaps.py``): then the next step is planned for the most that may be, and corrected when the tokens come.

A row that cannot go on behind a wrong token, as recurrent states cannot, computes known tokens again in its next step
(``PlannerFeature.recomputed_tokens``).
"""

from collections.abc import Iterable
from functools import partial

import msgspec
import numpy as np

from engine.features.speculation.drafted import DraftedGuesses
from engine.features.speculation.guesses import Guesses, SessionGuesses
from engine.features.speculation.messages import DRAFTED, NAME, Proposals, drafted_of, most_places_of
from engine.features.speculation.overlaps import Overlaps
from engine.features.speculation.payoff import Chance, Payoff
from engine.messages import StepDone, StepExtras
from engine.plugins.features import FeatureContext
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.proposer import DraftModel, Proposer
from engine.scheduling.rows import Rows, Sequence
from engine.scheduling.step_builder import NO_ROWS, Appends, Columns, InFlight, StepBuilder, Wave

Drafts = dict[int, tuple[int, ...]]
"""Row -> proposals that a step verifies; none for a row that has only overrun."""


class SpeculationPlanner(PlannerFeature):
    """The proposals for one planner's rows.  vocab_size: that of the model."""

    part = NAME

    def __init__(self, parts: PlannerParts, *, proposer: Proposer | DraftModel, vocab_size: int) -> None:
        self._awaits_tokens = False
        self._max_step_tokens = parts.limits.max_step_tokens
        self._table = table = parts.table
        self._features = parts.features
        self._page_manager = parts.pages
        self._decodes = parts.decodes
        self._requests = parts.requests
        self._guesses: Guesses = (
            DraftedGuesses(table, proposer)
            if isinstance(proposer, DraftModel)
            else SessionGuesses(table, proposer, vocab_size)
        )
        self._payoff = Payoff(tries_again=not self._guesses.free)
        # Rows of which the device counts too many tokens as computed: their next step must state where it begins.
        self._overrun: set[int] = set()
        self._drafted: dict[int, bytes] = {}
        self._overlaps = Overlaps(parts, self._guesses.num_tokens)
        self._is_steady = self._reads_first = False

    # ---- planning ---------------------------------------------------------------------------

    def waits(self, num_in_flight: int) -> bool:
        return num_in_flight > 0 and self._awaits_tokens and (self._reads_first or not self._overlaps.possible())

    def started(self, sequence: Sequence) -> None:
        """Note a row whose steps must not overlap."""
        self._overlaps.started(sequence)

    def plan(self, step: StepBuilder) -> None:
        """Add proposals for rows that decode in a step, if the tokens of steps in flight need not be known for that."""
        if step.overlaps and not self._awaits_tokens:
            return
        if step.overlaps:
            self._plan_counted(step)
            return
        decode_rows = step.decode_rows
        again = {row: self._recomputed(row) for row in decode_rows.tolist() if row in self._overrun}
        room = self._max_step_tokens - len(decode_rows) - step.num_prompt_tokens - sum(again.values())
        drafts: Drafts = dict.fromkeys(again, ())
        drafts |= self._draft(decode_rows.tolist(), room)
        self._overrun.difference_update(drafts)
        self._awaits_tokens = any(drafts.values()) or bool(self._overrun)  # a row that sits out may return at any time
        self._overlaps.planned(decode_rows, drafts)
        self._add(step, drafts, again)

    def _plan_counted(self, step: StepBuilder) -> None:
        """Add proposals behind tokens that the ranks count."""
        rows = step.decode_rows
        drafts = self._draft(self._overlaps.drafted(rows), self._overlaps.most_places - len(rows))
        self._overlaps.planned(rows, drafts, overlaps=True)
        self._add(step, drafts, {}, counted=rows)

    def _add(self, step: StepBuilder, drafts: Drafts, again: dict[int, int], counted: Rows = NO_ROWS) -> None:
        """Make rows of a step segments with proposals.  again: known tokens before the last to compute.

        counted: as in ``Proposals``."""
        decode_rows = step.decode_rows
        if len(counted):
            step.parts |= Proposals(rows=b"", positions=b"", tokens=b"", counted=counted.tobytes()).part()
        if not drafts:
            return
        rows = np.array(list(drafts), dtype=np.int32)
        counts = np.array([len(proposed) for proposed in drafts.values()], dtype=np.int32)
        table = self._table
        before = np.array([again.get(row, 0) for row in drafts], dtype=np.int32)
        known = table.num_planned[rows] - 1  # or the most that it may be
        table.num_computed[rows] += counts
        table.num_planned[rows] += counts
        step.appends.append(self._grow(rows))
        if any(drafts.values()):
            self._decodes.recount()
        # Position of each proposed token: after its row's last known one.
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        step.decode_rows = decode_rows[~np.isin(decode_rows, rows)]
        step.inserted = Columns(rows, known - 1 - before, before + counts + 1, counts + 1)
        step.notes[NAME] = drafts
        if any(drafts.values()):
            step.parts |= Proposals(
                rows=np.repeat(rows, counts).tobytes(),
                positions=(np.repeat(known, counts) + nth).astype(np.int32).tobytes(),
                tokens=np.array([one for proposed in drafts.values() for one in proposed], np.int32).tobytes(),
                counted=counted.tobytes(),
            ).part()

    def _recomputed(self, row: int) -> int:
        return sum(again(row) for again in self._features.recomputed_tokens)

    def _draft(self, decode_rows: list[int], most: int) -> Drafts:
        counts = self._counts(self._chances(decode_rows, own=1), len(decode_rows), most)
        self._reads_first = any(self._guesses.reads_first(row) for row in counts)
        return {row: self._guesses.of(row, count) for row, count in counts.items()}

    def _chances(self, rows: Iterable[int], *, own: int) -> dict[int, Chance]:
        """Return the chances of rows with a guess, after their tokens that are being sampled.

        own: number of tokens that the step has planned that is to verify the guesses."""
        chances: dict[int, Chance] = {}
        if self._guesses.rest:
            return chances
        table = self._table
        for row in rows:
            ahead = int(table.num_planned[row] - table.num_known[row]) - own
            if (chance := self._guesses.chance(row, ahead)) is not None:
                chances[row] = chance._replace(num=self._room(row, chance.num) - ahead)
        return chances

    def _counts(self, chances: dict[int, Chance], num_rows: int, most: int) -> dict[int, int]:
        """Return the number of proposals to verify, by row that gets any."""
        has_room = most > 0 and any(chance.num > 0 for chance in chances.values())
        if not has_room or not (self._guesses.free or self._payoff.knows(num_rows)):
            return {}
        chosen = self._payoff.counts([*chances.values()], num_rows, most)
        counts = {row: count for row, count in zip(chances, chosen, strict=True) if count}
        if not counts and (row := self._guesses.probe(chances)) is not None:
            return {row: min(chances[row].num, most)}
        self._guesses.decided(pays=bool(counts))
        return counts

    def _room(self, row: int, num: int) -> int:
        """Return how many of ``num`` proposals fit a row: its request, its pages, and new pages if these are plenty."""
        table = self._table
        known = int(table.num_known[row])
        num = min(num, int(table.max_total[row]) - known - 1)
        if self._page_manager.num_available <= len(self._decodes) * (2 + self._guesses.num_tokens):
            num = min(num, int(table.num_pages[row]) * table.page_size - known)
        for verified in self._features.verified_tokens:
            num = verified(row, num)
        return max(0, num)

    def _grow(self, rows: Rows) -> Appends:
        """Append pages for the tokens that the rows will have computed."""
        table = self._table
        missing = np.maximum(-(-table.num_computed[rows] // table.page_size) - table.num_pages[rows], 0)
        first = int(table.request_ids[rows[0]]) if len(rows) else -1
        pages = self._page_manager.allocate(int(missing.sum()), first)
        grown, indexes = np.repeat(rows, missing), np.zeros(len(pages), dtype=np.int32)
        for at, row in enumerate(grown.tolist()):
            indexes[at] = table.append_pages(np.array([row]), pages[at : at + 1])[0]
        return Appends(grown, indexes, pages)

    # ---- completion -------------------------------------------------------------------------

    def take(self, part: bytes, done: StepDone) -> bool:
        """Keep the tokens that the executors have drafted until ``waves``."""
        self._drafted, self._overlaps.most_places = drafted_of(part), most_places_of(part)
        return False

    def waves(self, record: InFlight, wave: Wave) -> list[Wave]:
        """Return the sampled tokens of a step with proposals, as far as decoding would have sampled the same."""
        drafts = drafts_of(record)
        if not drafts:
            return [wave]
        rows, tokens, extras = wave
        drafted, self._drafted = self._drafted, {}
        places: list[list[int]] = [list(range(record.num_decodes))]
        later: list[dict[int, StepExtras]] = [dict(extras)]
        at = record.num_decodes
        for row, asked in drafts.items():
            first = extras.get(row, StepExtras())
            proposed = asked if DRAFTED not in asked else np.frombuffer(drafted.get(row, b""), dtype=np.int32).tolist()
            said = tokens[at : at + len(proposed)].tolist()
            num_right = next((nth for nth, one in enumerate(proposed) if said[nth] != one), len(proposed))
            for nth in range(num_right + 1):
                if nth == len(places):
                    places.append([])
                    later.append({})
                places[nth].append(at + nth)
                one = first
                if nth:
                    one = StepExtras(logprobs=first.later_logprobs[nth - 1] if first.later_logprobs else None)
                # Counted token by token: the request may end before the last one.
                is_right = nth < num_right
                num_wrong = 0 if is_right else len(proposed) - num_right
                later[nth][row] = msgspec.structs.replace(
                    one, later_logprobs=(), num_accepted=int(is_right), num_rejected=num_wrong
                )
            at += len(asked) + 1
            if self._table.running[row]:
                self._guesses.verified(row, len(proposed), num_right)
                self._requests.meter.verified(len(proposed), num_right)
        places[0] += range(at, len(tokens))
        return [Wave(rows[place], tokens[place], of_row) for place, of_row in zip(places, later, strict=True)]

    def completed(self, record: InFlight, seconds: float) -> None:
        table, drafts = self._table, drafts_of(record)
        rows = np.array([row for row, proposed in drafts.items() if proposed and table.running[row]], dtype=np.int32)
        if len(rows):
            table.num_planned[rows] = table.num_known[rows] + self._overlaps.num_sampling(rows)
            table.num_computed[rows] = table.num_planned[rows] - 1
            self._overrun.update(rows.tolist())
            self._decodes.recount()
        self._measure(record, drafts, seconds)
        for row in dict.fromkeys(record.sampled_rows.tolist()):
            if table.running[row]:
                self._guesses.tokens_added(row)
        self._awaits_tokens = bool(self._overrun) or bool(self._promised(self._decodes.rows.tolist()))

    def _measure(self, record: InFlight, drafts: Drafts, seconds: float) -> None:
        num_proposed = sum(map(len, drafts.values()))
        num_rows = record.num_decodes + len(drafts)
        self._guesses.stepped(drafted=num_proposed > 0)
        if num_proposed and self._reads_first:
            pass
        elif num_proposed and not record.prefill_rows:
            self._payoff.note_verification(record.num_decodes + record.num_extra_tokens, num_rows, seconds)
        # Only a step that overlaps with the one before it shows the cost of such steps.
        elif self._is_steady and not drafts and not record.prefill_rows:
            self._payoff.note_decode(num_rows, seconds)
        self._is_steady = not drafts and not record.prefill_rows

    def _promised(self, rows: list[int]) -> dict[int, int]:
        """Return what would be verified if the tokens in flight were known, and as guessed."""
        return self._counts(self._chances(rows, own=0), len(rows), self._max_step_tokens - len(rows))

    def left(self, row: int) -> None:
        self._guesses.leave(row)
        self._overrun.discard(row)
        self._overlaps.left(row)

    def reset(self) -> list[Sequence]:
        self._guesses.clear()
        self._overrun.clear()
        self._drafted.clear()
        self._overlaps.clear()
        self._awaits_tokens = self._is_steady = False
        return []


def drafts_of(record: InFlight) -> Drafts:
    """Return the proposals that a step in flight verifies."""
    drafts: Drafts = record.notes.get(NAME, {})
    return drafts


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None without a proposer."""
    if context.proposer is None:
        return None
    return partial(SpeculationPlanner, proposer=context.proposer, vocab_size=context.vocab_size)
