"""The place in which a prompt departs from the last turn of its session, in words.

Owns: the texts around it, and its causes.  Does not know: tokens but these, sessions.
What follows the place is computed again, so a client reads here what to leave alone.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from engine.features.explain.session_turns import TurnDifference
from engine.text.codec import TextCodec
from server.clients import ClientRequest

LEAST_CHARS = 4  # in which two texts must agree
Cause = Literal["system", "tools", "thoughts", "tokens", "spaces", "answer"]
CAUSES: dict[Cause, str] = {
    "system": "the system prompt is another",
    "tools": "the tools or their order are others",
    "thoughts": "the thoughts of an earlier answer are left out",
    "tokens": "the text is the same, but the model wrote it in other tokens",
    "spaces": "spaces or line breaks differ",
    "answer": "an earlier answer is written in another way",
}


class DifferenceBody(msgspec.Struct, frozen=True, kw_only=True):
    """The first token in which a prompt differs from a turn of its session, an earlier request and its answer.

    id: of the turn; None if it is forgotten.  position: the token's, from 0.
    tokens: of the turn, from there on.  causes: as far as they are known.  text: a sentence on them.
    shared, was, now: texts before the token, of the turn from it on, and of the prompt; empty without a key."""

    id: str | None
    position: int
    tokens: int
    causes: list[Cause]
    text: str
    shared: str = ""
    was: str = ""
    now: str = ""


def difference_body(
    found: TurnDifference, one: ClientRequest, turn: ClientRequest | None, codec: TextCodec, *, shows: bool
) -> DifferenceBody:
    """Returns the difference of a request.  turn: the earlier one.  shows: whether its texts may be shown."""
    shared, was, now = (_text(codec, ids) for ids in (found.shared, found.was, found.now))
    causes: list[Cause] = []
    if turn is not None:
        names: tuple[Cause, Cause] = ("system", "tools")
        pairs = zip(names, one.exchange.opening, turn.exchange.opening, strict=True)
        causes += [name for name, is_now, was_then in pairs if is_now != was_then]
    if not causes:
        reasoning = codec.formats.reasoning
        causes += causes_of(found, shared, was, now, () if reasoning is None else reasoning.markers)
    why = f": {' and '.join(CAUSES[cause] for cause in causes)}" if causes else ""
    text = f"Its prompt departs from the last turn of its session at token {found.position}{why}."
    body = DifferenceBody(
        id=None if turn is None else turn.exchange.id,
        position=found.position,
        tokens=found.num_left,
        causes=causes,
        text=text,
    )
    return msgspec.structs.replace(body, shared=shared, was=was, now=now) if shows else body


def causes_of(found: TurnDifference, shared: str, was: str, now: str, markers: Sequence[str]) -> list[Cause]:
    """Returns the causes that the texts show.  markers: texts around the model's thoughts, the opening one first."""
    # Where a template writes empty thoughts in their place, the opening is shared.
    if any(marker in was and marker not in now for marker in markers) or shared.rstrip().endswith(tuple(markers[:1])):
        return ["thoughts"]
    if _agree(was, now):
        return ["tokens"]
    if _agree("".join(was.split()), "".join(now.split())):
        return ["spaces"]
    return ["answer"] if found.in_answer else []


def _agree(one: str, other: str) -> bool:
    length = min(len(one), len(other))
    return length >= LEAST_CHARS and one[:length] == other[:length]


def _text(codec: TextCodec, ids: bytes) -> str:
    """Returns the text of tokens, special ones by their names; a picture's have none."""
    pieces = map(codec.vocabulary.piece, np.frombuffer(ids, np.int32).tolist())
    return b"".join(pieces).decode("utf-8", "replace")
