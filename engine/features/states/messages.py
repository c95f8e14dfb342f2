"""The part of a step about states: copies from slot to slot.

Slot r is the running state of row r; the slots after those of all rows are snapshots.
"""

from typing import Final

import msgspec

from engine.messages import Step

NAME: Final = "states"


class StateCopies(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Copies of whole slots.  Those of one list are independent of each other.

    before: int32[2, B], sources and then targets, copied before the step's batch, from snapshots to rows.
    aside: int32[2, C], copied next, from rows to snapshots.  after: int32[2, A], the same after the batch."""

    before: bytes = b""
    after: bytes = b""
    aside: bytes = b""

    def part(self) -> dict[str, bytes]:
        """Return the parts of a step with these copies."""
        return {NAME: msgspec.msgpack.encode(self)}


NO_COPIES: Final = StateCopies()
_decoder = msgspec.msgpack.Decoder(StateCopies)


def copies_of(step: Step) -> StateCopies:
    """Return the copies of a step."""
    return _decoder.decode(part) if (part := step.parts.get(NAME)) is not None else NO_COPIES
