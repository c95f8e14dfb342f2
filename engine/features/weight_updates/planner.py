"""Weight updates in the planner: when the ranks change their weights, and which tokens each set of weights draws.

Owns: the weights that the ranks have, pauses, the mark at each row's first token of other weights.
Does not know: files, tensors, how a rank changes its weights.

The ranks read new weights while steps run.  When all have read them, no step is planned until those in flight have
completed; then all ranks change, and steps go on when all of them have.  So no step sees two sets of weights.  The
digest of a page's weights is part of its key (``Sequence.weights``), so pages of other weights are not found.  A row
that keeps its pages gives the tree no more of them, since they follow from two sets of weights.
"""

from functools import partial
from typing import Final, Literal

import msgspec
import numpy as np

from engine.features.weight_updates.messages import (
    COMMAND,
    NAME,
    Drop,
    FreeMemory,
    GiveBack,
    LoadWeights,
    Mode,
    Pause,
    Request,
    Resume,
    Switch,
    Tag,
    TakeBack,
    Update,
    Weights,
    command_of,
    error_of,
)
from engine.messages import Admit, FeatureAnswer, FeatureRequest, Finish, StepExtras
from engine.plugins.features import FeatureContext
from engine.scheduling.events import Why
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import InFlight, StepBuilder, Wave
from engine.types.errors import EngineDied
from engine.types.versions import NOTE, mark

KEPT_ENDS: Final = 64  # of commands
NO_VERSION: Final = -1  # less than any sequence has
NO_MARK: Final = StepExtras()


class WeightsPlanner(PlannerFeature):
    """The weights of one planner's ranks.

    path: of the model, as configured.  present: the weights that the next step is computed with.
    given_back: memory that the ranks have given back, or will when no step is in flight.
    ends: command -> why it failed, '' if it did not; of the last commands that have ended."""

    order = 90  # a sequence has its adapter's name by then
    is_on = False  # until the first command

    def __init__(self, parts: PlannerParts, path: str) -> None:
        self.path = path
        self.present = Weights()
        self.ends: dict[int, str] = {}
        self.pause: Pause | None = None
        self.given_back: set[Tag] = set()
        self.num_ranks = parts.limits.num_ranks
        self._parts = parts
        self._table = parts.table
        self._update: tuple[int, Update] | None = None
        self._pausing = -1  # the command, until its pause is reached
        self._phase: Literal["", "load", "drain", "switch", "free"] = ""
        self._memory = -1  # the command, until memory has been given back or is there again
        self._is_free = True  # all that ``given_back`` names has been given back
        self._held: list[Sequence] = []  # they start when those that finish first have finished
        self._loading = self.present
        self._has_present = True
        self._errors: list[str] = []
        self._num_requests = self._num_unanswered = 0
        self._requested: list[FeatureRequest] = []
        self._unmarked: set[int] = set()

    # ---- commands and answers ---------------------------------------------------------------

    def received(self, message: FeatureAnswer) -> None:
        """Take a command, or a rank's answer; the last one ends the phase."""
        if message.feature != NAME:
            return
        if message.rank == COMMAND:
            self._turn_on()
            self._command(message)
        elif message.number == self._num_requests and self._num_unanswered:
            self._errors += filter(None, [error_of(message)])
            self._num_unanswered -= 1
            if not self._num_unanswered:
                {"load": self._loaded, "switch": self._switched, "free": self._freed}[self._phase]()

    def _turn_on(self) -> None:
        if not self.is_on:
            self.is_on = True
            self._parts.features.refresh()

    def _command(self, message: FeatureAnswer) -> None:
        number = message.number
        match command_of(message):
            case Update() as update if self._update is None:
                weights = update.weights
                at = self.present.number + 1
                weights = msgspec.structs.replace(weights, number=at, version=weights.version or str(at))
                self._update = number, msgspec.structs.replace(update, weights=weights)
            case Update():
                self._end(number, "another update is under way")
            case Pause() as pause:
                self._end(self._pausing, "another pause took its place")
                self.pause, self._pausing = pause, number
                if not self._parts.completions.in_flight and not self._table.running.any():
                    self._reach(pause.mode)  # executors that sleep run nothing, and no step is planned for them
            case Resume():
                self._end(self._pausing, "the engine was resumed before the pause was reached")
                self.pause = None
                self._let_go()
                self._end(number)
            case GiveBack() | TakeBack() if self._memory >= 0 or self._update is not None:
                self._end(number, "an update, or another change of the memory, is under way")
            case GiveBack(tags):
                self.given_back |= {*tags}
                self._is_free, self._memory = False, number
            case TakeBack(tags):
                self._regain(number, {*tags} & self.given_back)

    def _end(self, command: int, error: str = "") -> None:
        if command >= 0:
            self.ends[command] = error
            self.ends.pop(command - KEPT_ENDS, None)
        if command == self._pausing:
            self._pausing = -1
        if command == self._memory:
            self._memory = -1

    def _regain(self, command: int, tags: set[Tag]) -> None:
        """Take memory again; weights are read again."""
        self.given_back -= tags
        if "weights" in tags:
            self._has_present, self._memory = False, command
        else:
            self._end(command)

    def _ask(self, request: Request, phase: Literal["load", "switch", "free"]) -> None:
        self._num_unanswered, self._errors, self._phase = self._parts.limits.num_ranks, [], phase
        self._send(request)

    def _send(self, request: Request) -> None:
        self._num_requests += 1
        body = msgspec.msgpack.encode(request)
        self._requested.append(FeatureRequest(feature=NAME, number=self._num_requests, body=body))

    def outgoing(self) -> list[FeatureRequest]:
        requested, self._requested = self._requested, []
        return requested

    # ---- the change -------------------------------------------------------------------------

    def waits(self, num_in_flight: int) -> bool:
        """Return whether the weights change now or an operator has stopped the rows; go on with the change."""
        if not self._phase and not self._is_free:
            return self._free(num_in_flight)
        if not self._phase and (self._update is not None or not self._has_present):
            update = self._update if self._has_present else None
            self._loading = self.present if update is None else update[1].weights
            self._ask(LoadWeights(self._loading), "load")
        if self._phase in ("switch", "free") or not self._has_present:
            return True
        if (mode := self._mode) is None:
            return bool(self.given_back)
        if num_in_flight or (mode == "finish" and (self._table.running.any() or self._finishing)):
            return mode != "finish" or bool(self.given_back)
        self._let_go()
        if self._phase == "drain":
            self._end_requests(0 if self._update is None else self._update[1].most)
            self._leave_rows(mode)
            self._ask(Switch(self._loading.number), "switch")
        elif self._pausing >= 0:
            self._reach(mode)
        return True

    def _free(self, num_in_flight: int) -> bool:
        """Let the ranks give memory back when nothing uses it.  Return True: nothing is planned.

        Pages that features keep, as for another engine that reads them, are waited for."""
        loses_pages = "kv_cache" in self.given_back
        if not num_in_flight and not (loses_pages and self._parts.pages.num_kept):
            self._leave_rows("retract")
            assert self._table.num_free == len(self._table.sequences), "rows have pages that are given back"
            self._forget_pages()
            self._ask(FreeMemory(tuple(sorted(self.given_back))), "free")
        return True

    def _freed(self) -> None:
        """Stay without the memory, or take it again if a rank cannot give it back."""
        self._phase, self._is_free = "", True
        if self._errors:
            self.given_back, self._has_present = set(), self._has_present and "weights" not in self.given_back
        self._end(self._memory, self._errors[0] if self._errors else "")

    def blocks(self) -> bool:
        """Return whether running rows are to finish and no other is to start."""
        return self._mode == "finish" and not self._finishing

    def hold(self, sequence: Sequence) -> Why | None:
        """Let requests wait that have no token yet, while those that have some finish."""
        if self._mode != "finish" or len(sequence.tokens) > sequence.num_prompt:
            return None
        self._held.append(sequence)
        return "queue"

    def num_held(self) -> int:
        """Return the number of these."""
        return len(self._held)

    def forget(self, sequence: Sequence) -> bool:
        """Return whether the sequence was one of these."""
        num_held = len(self._held)
        self._held = [one for one in self._held if one is not sequence]
        return len(self._held) < num_held

    @property
    def _finishing(self) -> bool:
        """Whether a request with tokens has lost its row; the weights that drew them draw the others."""
        open_requests = self._parts.requests.open.values()
        return any(one.row < 0 and len(one.tokens) > one.num_prompt for one in open_requests)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for sequence in held:
            self._parts.prefills.wait(sequence)

    @property
    def _loads_update(self) -> bool:
        return self._update is not None and self._update[1].weights == self._loading

    @property
    def _mode(self) -> Mode | None:
        """The mode of a pause or of a change that is due; None if rows go on."""
        pause = None if self.pause is None else self.pause.mode
        if self._phase == "drain" and self._update is not None:
            # A pause aborts what was there when it began, and no request that has come since.
            return self._update[1].mode or (pause if pause != "abort" else None) or "retract"
        return pause

    def _loaded(self) -> None:
        """Go on when all ranks have read the weights, or end an update that one of them could not read."""
        if self._errors and not self._loads_update and self._memory >= 0:
            self.given_back |= {"weights"}
            self._has_present, self._phase = True, ""
            self._end(self._memory, self._errors[0])
        elif self._errors and not self._loads_update:
            raise EngineDied(f"new executors cannot have the present weights {self.present.version}: {self._errors[0]}")
        elif self._update is not None and self._errors:
            self._end(self._update[0], self._errors[0])
            self._update, self._phase = None, ""
            self._send(Drop())
        elif self._has_present:
            self._phase = "drain"
        else:
            self._ask(Switch(self._loading.number), "switch")

    def _switched(self) -> None:
        """Go on with the new weights."""
        if self._errors:
            raise EngineDied(f"executors cannot change to weights {self._loading.version}: {self._errors[0]}")
        self._phase, self._has_present = "", True
        if self._is_free:
            self.given_back -= {"weights"}
        if self._update is None or not self._loads_update:
            if self._is_free:
                self._end(self._memory)
            return
        (command, update), self._update = self._update, None
        self.present = update.weights
        for sequence in self._parts.requests.open.values():
            if sequence.row >= 0:
                self._unmarked.add(sequence.row)
            else:
                self._name_weights(sequence)
        self._forget_pages()
        self._parts.prefills.unblock()
        self._end(command)

    def _forget_pages(self) -> None:
        """Empty the cache, unless rows or features keep their pages, and what features have fetched."""
        if self._table.num_free == len(self._table.sequences) and not self._parts.pages.num_kept:
            self._parts.pages.forget()
            for pages_lost in self._parts.features.pages_lost:
                pages_lost()
        for sequence in [*self._parts.requests.open.values()]:
            if sequence.row >= 0:
                continue
            held = [forget(sequence) for forget in self._parts.features.forget]
            if any(held):
                self._parts.prefills.wait(sequence)

    def _reach(self, mode: Mode) -> None:
        """End the command of a pause, since no step is in flight."""
        if mode in ("retract", "abort"):
            self._leave_rows(mode)
        self._end(self._pausing)

    def _leave_rows(self, mode: Mode) -> None:
        """Send running rows back to the queue, or end all requests.

        Rows that keep their pages stay, if they have all their prompt's."""
        table = self._table
        if mode == "abort":
            self._end_requests(NO_VERSION)
        for row in np.flatnonzero(table.running).tolist():
            sequence = table.sequences[row]
            assert sequence is not None, f"row {row} runs and is free"
            if mode == "keep" and table.num_known[row] > len(sequence.tokens):
                self._parts.pages.seal(row)
            else:
                self._parts.completions.retract(sequence)

    def _end_requests(self, most: int) -> None:
        """End the requests whose tokens are of at least ``most`` versions; 0 for none."""
        requests = self._parts.requests
        for sequence in [*requests.open.values()] if most else ():
            if self._num_versions(sequence) < most:
                continue
            if sequence.row >= 0:
                self._parts.completions.end(sequence.row, Finish.ABORT)
            else:
                self._parts.prefills.forget(sequence)
                requests.end(sequence, Finish.ABORT, len(sequence.tokens))
            requests.send_end(sequence.request_id, Finish.ABORT)

    def _num_versions(self, sequence: Sequence) -> int:
        known = len(sequence.tokens) if sequence.row < 0 else int(self._table.num_known[sequence.row])
        _, num_versions = sequence.notes.get(NAME, (0, 0))
        return num_versions or int(known > sequence.num_prompt)

    def _name_weights(self, sequence: Sequence) -> None:
        adapter, digest = sequence.weights.partition(":")[0], self.present.digest
        sequence.weights = f"{adapter}:{digest}" if digest else adapter

    # ---- rows -------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, message: Admit) -> None:
        self._name_weights(sequence)

    def started(self, sequence: Sequence) -> None:
        """Note whether the row's tokens are of other weights than those before, or than the first ones."""
        if sequence.notes.get(NAME, (0, 0))[0] != self.present.number and sequence.params.generates:
            self._unmarked.add(sequence.row)

    def left(self, row: int) -> None:
        """Name the present weights, which compute the row's tokens if it comes back."""
        if (sequence := self._table.sequences[row]) is not None:
            self._name_weights(sequence)
        self._unmarked.discard(row)

    def attach(self, step: StepBuilder) -> None:
        """Note the rows whose first token of the present weights the step samples."""
        if not self._unmarked:
            return
        sampled = set(step.decode_rows.tolist())
        for columns in (step.prompts, step.inserted):
            if columns is not None:
                sampled |= set(columns.rows[columns.samples > 0].tolist())
        if rows := sampled & self._unmarked:
            step.notes[NAME] = rows
            self._unmarked -= rows

    def waves(self, record: InFlight, wave: Wave) -> list[Wave]:
        """Mark the rows' next tokens as those of the present weights, which no step in flight outlasts."""
        extras = dict(wave.extras)
        for row in record.notes.get(NAME, ()):
            sequence = self._table.sequences[row]
            if sequence is not None and self._table.running[row]:
                num_tokens = int(self._table.num_known[row]) - sequence.num_prompt
                marked = mark(num_tokens, self.present.version)
                extras[row] = msgspec.structs.replace(extras.get(row, NO_MARK), result=marked)
                sequence.notes[NOTE] = sequence.notes.get(NOTE, b"") + marked
                if sequence.notes.get(NAME, (0, 0))[0] != self.present.number:
                    sequence.notes[NAME] = self.present.number, self._num_versions(sequence) + 1
        return [wave._replace(extras=extras)]

    # ---- other ranks, other planners --------------------------------------------------------

    def reset(self) -> list[Sequence]:
        """Let new ranks, which have the weights of ``model.path``, read the present ones before the first step.

        Ranks that stay and were to change may have done so."""
        self._has_present = not self.present.number and self._phase != "switch" and self._has_present
        self._phase, self._num_unanswered, self._requested = "", 0, []
        self._is_free = not self.given_back  # new ranks have all of their memory
        if "weights" in self.given_back:
            self._has_present = True
        self._unmarked.clear()
        if self.pause is not None and self.pause.mode in ("keep", "retract"):
            self._end(self._pausing)  # all rows are in the queue
        for sequence in self._parts.requests.open.values():
            self._name_weights(sequence)
        held, self._held = self._held, []
        return held

    def succeeds(self, other: PlannerFeature) -> None:
        """Go on with the weights of another planner, or with those of another ``model.path``, which are new ones."""
        assert isinstance(other, WeightsPlanner)
        if not other.is_on:
            return
        self._turn_on()
        self.ends, self.pause, self._pausing, self._update = other.ends, other.pause, other._pausing, other._update
        self._num_requests, self.given_back, self._memory = other._num_requests, other.given_back, other._memory
        self.present = other.present
        if self.path != other.path:
            number = other.present.number + 1
            self.present = Weights(number=number, version=str(number))
            if self._update is not None:
                self._end(self._update[0], "the model was replaced meanwhile")
                self._update = None
        self.reset()

    def gauges(self) -> dict[str, int]:
        """Return the number of the present weights, and whether rows are paused."""
        return {
            "weights_number": self.present.number,
            "rows_paused": int(self.pause is not None or bool(self.given_back)),
            "memory_released": int(bool(self.given_back)),
        }


def planner_feature(context: FeatureContext) -> NewFeature:
    """Return the builder of the feature."""
    return partial(WeightsPlanner, path=context.config.model.path)
