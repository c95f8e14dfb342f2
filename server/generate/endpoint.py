"""What differs between the endpoints that generate text.

Owns: the seam between ``generate.py``, which knows the flow, and completions and chat, which know the formats.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from engine.messages import Delta
from server.generate.generation import Generation
from server.generate.output import Cursor, Output
from server.generate.usage import OptionalUsage, UsageBody

B = TypeVar("B", bound=msgspec.Struct, contravariant=True)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every chunk and answer of one request repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Endpoint(Protocol[B]):
    """One generating endpoint.

    id_prefix: of the ids it gives out.  prompt_field: what it calls the prompt, for errors about it.
    """

    id_prefix: str
    prompt_field: str

    def translate(self, body: B) -> Generation:
        """Raises RequestError for what cannot be asked."""

    def answer(self, head: Head, generation: Generation, outputs: Sequence[Output], usage: UsageBody) -> msgspec.Struct:
        """The whole answer."""

    def chunks(self, head: Head, cursor: Cursor, delta: Delta, usage: OptionalUsage) -> list[msgspec.Struct]:
        """The stream's events for one delta of one choice."""

    def usage_chunk(self, head: Head, usage: UsageBody) -> msgspec.Struct:
        """The stream's last event, for who asked for it."""
