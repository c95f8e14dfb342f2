"""The adapters that executors read into memory of the host, before a step places them: what a planner knows of it.

Owns: which adapters are asked for, and which sequences wait for one.  Does not know: slots, rows, the queue.
An adapter is read once for all sequences that want it, and kept until a step places it or none of them is left.
"""

from dataclasses import dataclass, field

from engine.features.lora.files import Adapter
from engine.features.lora.messages import ReadAdapter
from engine.messages import FeatureRequest
from engine.scheduling.rows import Sequence

_UNSENT = -1


@dataclass(slots=True)
class _Reading:
    """One adapter.  number: of its request.  held: sequences that wait, by request.  users: requests that want it.

    num_unanswered: number of ranks that have not read it."""

    adapter: Adapter
    num_unanswered: int
    number: int = _UNSENT
    held: dict[int, Sequence] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)


class Readings:
    """The adapters that are being read, or are read and in no slot.  most: number that the ranks keep at once."""

    def __init__(self, most: int, num_ranks: int) -> None:
        self._most = most
        self._num_ranks = num_ranks
        self._all: dict[str, _Reading] = {}  # by digest
        self._outgoing: list[FeatureRequest] = []
        self._num_sent = 0

    @property
    def num_held(self) -> int:
        """Number of sequences that wait."""
        return sum(len(one.held) for one in self._all.values())

    def want(self, sequence: Sequence, adapter: Adapter) -> bool:
        """Return whether the adapter is read; else ask for it, and keep the sequence until it is."""
        reading = self._all.get(adapter.digest)
        if reading is None:
            reading = self._all[adapter.digest] = _Reading(adapter, self._num_ranks)
        reading.users.add(sequence.request_id)
        if not reading.num_unanswered:
            return True
        reading.held[sequence.request_id] = sequence
        self._send()
        return False

    def answered(self, number: int, reason: str) -> list[Sequence]:
        """Take one rank's answer.  Return the sequences that wait no longer: the adapter is read, or cannot be."""
        reading = next((one for one in self._all.values() if one.number == number), None)
        if reading is None:
            return []  # it was dropped, or another rank could not read it
        if reason:
            self._drop(reading)
            return list(reading.held.values())
        reading.num_unanswered -= 1
        if reading.num_unanswered:
            return []
        held, reading.held = reading.held, {}
        return list(held.values())

    def placed(self, adapter: Adapter) -> tuple[bool, list[Sequence]]:
        """Note that a step places the adapter.  Return whether all ranks have read it, and the sequences that wait."""
        if (reading := self._all.get(adapter.digest)) is None:
            return False, []
        if not reading.num_unanswered:
            del self._all[adapter.digest]
            self._send()
            return True, []
        self._drop(reading)  # its step reads it
        return False, list(reading.held.values())

    def leave(self, request_id: int) -> bool:
        """Note that a request wants nothing any more.  Return whether its sequence was kept here."""
        was_held = False
        for reading in list(self._all.values()):
            was_held |= reading.held.pop(request_id, None) is not None
            reading.users.discard(request_id)
            if not reading.users:
                self._drop(reading)
        return was_held

    def _drop(self, reading: _Reading) -> None:
        del self._all[reading.adapter.digest]
        if reading.number != _UNSENT:
            self._outgoing.append(ReadAdapter(reading.adapter, drop=True).message(reading.number))
        self._send()

    def _send(self) -> None:
        """Ask for the first adapters that the ranks have room for."""
        for reading in list(self._all.values())[: self._most]:
            if reading.number == _UNSENT:
                reading.number = self._num_sent
                self._num_sent += 1
                self._outgoing.append(ReadAdapter(reading.adapter).message(reading.number))

    def outgoing(self) -> list[FeatureRequest]:
        """Return the messages for the executors since the last call."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def clear(self) -> list[Sequence]:
        """Forget every adapter.  Return the sequences that waited."""
        sequences = [sequence for one in self._all.values() for sequence in one.held.values()]
        self._all.clear()
        self._outgoing.clear()
        return sequences
