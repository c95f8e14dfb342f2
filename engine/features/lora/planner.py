"""LoRA in the planner: which adapter lies in which slot of the executors, and which rows read it.

Owns: a planner's slots, and the slots and adapters in a step.  Does not know: what an adapter computes, names, files.
A sequence whose adapter is in no slot is held until the executors have read its files, while steps of others run.
"""

from functools import partial
from typing import Final

import msgspec

from engine.features.lora.files import NAME, Adapter, Placement
from engine.features.lora.messages import AdapterRead
from engine.features.lora.readings import Readings
from engine.features.lora.settings import LoraSettings
from engine.features.lora.slots import AdapterSlots
from engine.messages import Admit, Failed, FeatureAnswer, FeatureRequest, Finish, StepDone
from engine.plugins.features import FeatureContext
from engine.scheduling.events import Why
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import Sequence
from engine.scheduling.step_builder import StepBuilder
from engine.types.errors import RequestError

NO_SLOT: Final = 0


class LoraPlanner(PlannerFeature):
    """The slots of one planner's executors.  num_slots: adapters that the executors hold at once."""

    part = NAME

    def __init__(self, parts: PlannerParts, num_slots: int) -> None:
        self._parts = parts
        self._slots = AdapterSlots(num_slots)
        self._readings = Readings(num_slots, parts.limits.num_ranks)
        self._of_row: dict[int, int] = {}
        self._to_place: dict[int, tuple[Adapter, bool]] = {}  # by row that the next step admits

    def admit(self, sequence: Sequence, message: Admit) -> None:
        if (part := message.parts.get(NAME)) is not None:
            sequence.weights = part.digest
            sequence.notes[NAME] = Adapter.of(part)

    def hold(self, sequence: Sequence) -> Why | None:
        """Let the executors read the sequence's adapter, unless it is in a slot or read."""
        adapter = sequence.notes.get(NAME)
        if adapter is None or self._slots.holds(adapter) or self._readings.want(sequence, adapter):
            return None
        return "weights"

    def outgoing(self) -> list[FeatureRequest]:
        return self._readings.outgoing()

    def received(self, message: FeatureAnswer) -> None:
        """Take one rank's answer.  The last one gives sequences back to the queue, or ends them."""
        if message.feature != NAME:
            return
        reason = AdapterRead.of(message).reason
        sequences = self._readings.answered(message.number, reason)
        if not reason:
            self._give_back(sequences)
            return
        requests, error = self._parts.requests, RequestError(reason, status=500, code="adapter_lost")
        for sequence in sequences:
            requests.end(sequence, Finish.ERROR, len(sequence.tokens))
            requests.outbox.append(Failed.of(sequence.request_id, error))

    def _give_back(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._parts.prefills.wait(sequence)

    def num_held(self) -> int:
        """Return the number of sequences that wait for their adapters."""
        return self._readings.num_held

    def forget(self, sequence: Sequence) -> bool:
        return self._readings.leave(sequence.request_id)

    def ended(self, sequence: Sequence) -> None:
        if NAME in sequence.notes:
            self._readings.leave(sequence.request_id)

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether there is a slot for the sequence's adapter, if it has one."""
        adapter = sequence.notes.get(NAME)
        return adapter is None or self._slots.has_room(adapter)

    def started(self, sequence: Sequence) -> None:
        """Take a slot for the row."""
        if (adapter := sequence.notes.get(NAME)) is None:
            return
        self._of_row[sequence.row], is_new = self._slots.take(sequence.row, adapter)
        if is_new:
            is_read, waiting = self._readings.placed(adapter)
            self._to_place[sequence.row] = (adapter, is_read)
            self._give_back(waiting)

    def attach(self, step: StepBuilder) -> None:
        """Add the slots of new rows to the step, and adapters that the executors lack."""
        if not self._of_row:
            return
        placed = [
            Placement(one.row, self._of_row[one.row], *self._to_place.pop(one.row, ()))
            for one in step.admissions
            if one.row in self._of_row
        ]
        if placed:
            step.parts[NAME] = msgspec.msgpack.encode(placed)

    def take(self, part: bytes, done: StepDone) -> bool:
        """End rows whose adapter could not be read, whether they have a token or not."""
        lost = msgspec.msgpack.decode(part, type=dict[int, str])
        for row in lost:  # also for rows that have ended meanwhile: the slot does not hold the adapter
            self._slots.forget(row)
        for row, reason in lost.items():
            if self._parts.table.running[row]:
                self._parts.completions.fail(row, RequestError(reason, status=500, code="adapter_lost"))
        return bool(lost)

    def released(self, row: int) -> None:
        """Give the row's slot back."""
        if self._of_row.pop(row, NO_SLOT):
            self._slots.release(row)

    def gauges(self) -> dict[str, int]:
        """Return the number of slots."""
        return {"num_adapter_slots": self._slots.num_slots}

    def reset(self) -> list[Sequence]:
        """Forget every slot: new executors hold no adapter."""
        self._slots = AdapterSlots(self._slots.num_slots)
        self._of_row.clear()
        self._to_place.clear()
        return self._readings.clear()


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None if no adapters are served."""
    lora = LoraSettings.of(context.config)
    return partial(LoraPlanner, num_slots=lora.max_adapters) if lora.folder else None
