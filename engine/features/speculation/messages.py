"""Speculation's parts of a step and of its result: the proposed tokens, and those that a draft model has proposed."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Step

NAME: Final = "speculation"
DRAFTED: Final = -1  # instead of a proposed token: the executors' draft model names it

Int32 = npt.NDArray[np.int32]


class Proposals(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Tokens that may follow the known ones of rows, to be verified by the tokens that are sampled.

    They are written before the step runs.  A row that has some in a step is a segment in the next step too, which gives
    its start.
    rows, positions: int32[K].  tokens: int32[K], a token each, or ``DRAFTED`` in all places.
    counted: int32, rows of the step of which only the device knows how many tokens the steps in flight will have added.
    What the step states of their positions is the most that is possible."""

    rows: bytes
    positions: bytes
    tokens: bytes
    counted: bytes = b""

    def part(self) -> dict[str, bytes]:
        """Return the parts of a step with these proposals."""
        return {NAME: msgspec.msgpack.encode(self)}

    def columns(self) -> tuple[Int32, Int32, Int32]:
        """Return rows, positions and tokens."""
        rows, positions, tokens = (
            np.frombuffer(one, dtype=np.int32) for one in (self.rows, self.positions, self.tokens)
        )
        return rows, positions, tokens


class DraftedTokens(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A result's part.  by_row: int32[k], the tokens in place of ``DRAFTED``, as many or none.

    most_places: tokens of a step with ``Proposals.counted`` that the ranks can run; 0 if they can run none."""

    by_row: dict[int, bytes]
    most_places: int = 0


NO_PROPOSALS: Final = Proposals(rows=b"", positions=b"", tokens=b"")
_decoder = msgspec.msgpack.Decoder(Proposals)
_result_decoder = msgspec.msgpack.Decoder(DraftedTokens)


def proposals_of(step: Step) -> Proposals:
    """Return the proposals of a step."""
    return _decoder.decode(part) if (part := step.parts.get(NAME)) is not None else NO_PROPOSALS


def drafted_part(by_row: Mapping[int, bytes], most_places: int = 0) -> bytes:
    """Return the part of a result, as in ``DraftedTokens``."""
    return msgspec.msgpack.encode(DraftedTokens(by_row=dict(by_row), most_places=most_places))


def drafted_of(part: bytes) -> dict[int, bytes]:
    """Return the drafted tokens of a result by row, from its part."""
    return _result_decoder.decode(part).by_row


def most_places_of(part: bytes) -> int:
    """Return ``DraftedTokens.most_places`` of a result's part."""
    return _result_decoder.decode(part).most_places


def result_by_row(part: bytes) -> dict[int, DraftedTokens]:
    """Return a result's part by rows, for what gives a row's result to another step."""
    whole = _result_decoder.decode(part)
    return {row: msgspec.structs.replace(whole, by_row={row: tokens}) for row, tokens in whole.by_row.items()}


def result_of_rows(by_row: Mapping[int, DraftedTokens]) -> bytes:
    """Return the part of a result from that of each row."""
    tokens = {row: found for row, one in by_row.items() for found in one.by_row.values()}
    return drafted_part(tokens, max((one.most_places for one in by_row.values()), default=0))


def without_tokens(part: bytes) -> bytes:
    """Return the part of a step without the values of tokens."""
    return msgspec.msgpack.encode(msgspec.structs.replace(_decoder.decode(part), tokens=b""))


def with_other_tokens(part: bytes, others: Callable[[bytes], bytes]) -> bytes:
    """Return the part of a result with other token ids."""
    by_row = {row: others(tokens) for row, tokens in drafted_of(part).items()}
    return drafted_part(by_row, most_places_of(part))
