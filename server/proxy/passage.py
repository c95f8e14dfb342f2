"""A request through a router: what its client has so far, and what another replica needs to go on with it.

Owns: which of a replica's bytes are passed on, and the request as it is sent to each replica.
Does not know: HTTP, which replica is asked, what the events say.

A replica marks its events: a comment behind them says which tokens they hold.  Events and their mark are passed on
together, so what the client has and what is known of it are the same at any moment.  Draws depend on seed and position
alone, so a replica that is given the tokens goes on as the first one would have.
"""

import re

import msgspec

from engine.messages import Finish
from engine.types.errors import CallboardError
from server.generate.generation import DeliveredChoice, ResumePoint, new_seed
from server.http.sse import PING_COMMENT, PING_EVENT

# A mark is a comment, see ``_mark`` in server/generate/route.py.  JSON has no line breaks, so no event has one within.
COMMENT = b": "
END = b"\n\n"
MARK = re.compile(rb": (\d{1,9}) ((?:[0-9a-f]{8})*) (\d{1,9}) (\d{1,9}) (\d{1,9})")
PINGS = frozenset({PING_COMMENT, PING_EVENT})  # only where nothing is held back, since events come with their mark


class WrongMark(CallboardError):
    """A replica has sent a mark that no replica of this version makes."""


class Passage:
    """One request through the router.  body: JSON.  num_prompt_tokens, num_tokens: as far as replicas have counted."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._origin = ResumePoint()
        self._seed = new_seed()
        self._held = b""
        self._choices: dict[int, _PassedChoice] = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once."""
        return sum(one.num_prompt_tokens for one in self._choices.values())

    @property
    def num_tokens(self) -> int:
        """The number of output tokens of all choices."""
        return sum(len(one.tokens) for one in self._choices.values()) // 4

    @property
    def has_begun(self) -> bool:
        """Whether the client has anything."""
        return bool(self._choices)

    @property
    def has_ended(self) -> bool:
        """Whether the client has every choice that it has anything of to its end."""
        return self.has_begun and all(one.finish != Finish.RUNNING for one in self._choices.values())

    @property
    def was_aborted(self) -> bool:
        """Whether a choice was aborted, which would not end elsewhere."""
        return any(one.finish == Finish.ABORT for one in self._choices.values())

    def pieces(self) -> tuple[bytes, ...]:
        """Returns what to send to a replica, so that it goes on from what the client has: the body is not copied."""
        self._held = b""
        told = {
            index: DeliveredChoice(bytes(one.tokens), one.num_events, one.finish != Finish.RUNNING)
            for index, one in self._choices.items()
        }
        origin = msgspec.structs.replace(self._origin, seed=self._seed, told=told)
        return b'{"request":', self._body, b',"origin":', msgspec.json.encode(origin), b"}"

    def take(self, chunk: bytes) -> bytes:
        """Take what a replica has sent; returns what is for the client now.

        Raises WrongMark once everything before it is with the client."""
        held = self._held + chunk
        parts, passed, at = [], 0, 0
        for block in held.split(END)[:-1]:
            end = at + len(block) + len(END)
            if block + END in PINGS:
                parts.append(held[passed:end])
                passed = end
            elif block.startswith(COMMENT):
                if (mark := MARK.fullmatch(block)) is None:
                    if passed:
                        break
                    raise WrongMark(f"{block[:80]!r} is no mark of choice, tokens, finish, prompt and events")
                parts.append(held[passed:at])
                self._note(*mark.groups())
                passed = end
            at = end
        self._held = held[passed:]
        return b"".join(parts)

    def _note(self, index: bytes, tokens: bytes, finish: bytes, num_prompt: bytes, num_events: bytes) -> None:
        choice = self._choices.setdefault(int(index), _PassedChoice())
        choice.tokens += bytes.fromhex(tokens.decode())
        choice.finish = int(finish)
        choice.num_events += int(num_events)
        choice.num_prompt_tokens = int(num_prompt) or choice.num_prompt_tokens

    def rest(self) -> bytes:
        """Returns what follows the last mark, once the replica has ended its stream.  Raises WrongMark."""
        self.take(b"")
        held, self._held = self._held, b""
        return held


class WholeLines:
    """A stream of lines, of which the client gets no half: an error may follow as a line of its own."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, chunk: bytes) -> bytes:
        """Take what a replica has sent; returns the lines that are whole."""
        lines, end, self._held = (self._held + chunk).rpartition(b"\n")
        return lines + end

    def rest(self) -> bytes:
        """Returns what follows the last line, once the replica has ended its stream."""
        return self._held


class _PassedChoice:
    """A choice as far as the client has it.  tokens: int32[n]."""

    __slots__ = ("finish", "num_events", "num_prompt_tokens", "tokens")

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.finish = int(Finish.RUNNING)
        self.num_events = 0
        self.num_prompt_tokens = 0
