"""The part of a step about states: copies from slot to slot.

Slot r is the running state of row r; the slots after those of all rows are snapshots, those in host memory last.
A source below 0 is a state that arrives from elsewhere before the copies.
"""

from typing import Final

import msgspec

from engine.messages import Step

NAME: Final = "states"
ARRIVING: Final = -1  # the source of a copy, less the number of what brings the state


class StateCopies(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Copies of whole slots.

    before: int32[2, B], sources and then targets, copied before the step's batch, one after the other.
    after: int32[2, A], copied after it."""

    before: bytes = b""
    after: bytes = b""

    def part(self) -> dict[str, bytes]:
        """Return the parts of a step with these copies."""
        return {NAME: msgspec.msgpack.encode(self)}


NO_COPIES: Final = StateCopies()
_decoder = msgspec.msgpack.Decoder(StateCopies)


def copies_of(step: Step) -> StateCopies:
    """Return the copies of a step."""
    return _decoder.decode(part) if (part := step.parts.get(NAME)) is not None else NO_COPIES
