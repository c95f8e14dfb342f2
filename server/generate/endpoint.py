"""The seam between the one flow of endpoints that generate and their formats, in which they differ.

Owns: what an endpoint must have, and what most of them have alike.  Does not know: the flow, which is ``route.py``'s.
A new generating endpoint is an ``Endpoint`` for its requests and a ``Writer`` for its answers.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from engine.messages import Delta
from engine.types.errors import RequestError
from server.generate.generation import Generation
from server.generate.output import Output, PlainText, UsageCounter
from server.http.operation import Operation
from server.http.replies import error_body
from server.http.sse import PING_COMMENT

B = TypeVar("B", bound=msgspec.Struct)


class Writer(Protocol):
    """Writes the answer to one request, whole or as the events of a stream.  id: the answer's own; "" for none.

    parts: names of some of its choices -> which they are.
    kept: waits until the whole answer is stored, if it is to be; the client learns of it only then.  It raises
    RequestError if it cannot be."""

    id: str
    parts: Mapping[str, range] = MappingProxyType({})
    kept: Callable[[], Awaitable[None]] | None = None

    def whole(self, outputs: Sequence[Output]) -> object:
        """Returns the answer in one piece, as what its JSON says."""

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        """Returns the stream's events for new output of a choice."""
        return []

    def plain(self, index: int) -> PlainText | None:
        """Returns how a choice's events look from now on that hold nothing but text; None if they differ."""
        return None

    def go_on_after(self, num_events: int) -> None:
        """The client has so many events of the stream from another replica; those of the same output were left out."""
        return None

    def last_events(self) -> list[msgspec.Struct]:
        """Returns the stream's events for after every choice has ended."""
        return []

    def failure(self, error: RequestError) -> msgspec.Struct:
        """Returns the last event of a stream that fails."""
        return error_body(error)


class Endpoint(Protocol[B]):
    """One generating endpoint.

    operation: the declaration of its route.
    task: what it asks of a model.  refusal: why a model without the task refuses, as the end of a sentence.
    elsewhere: fields that belong into another one, see ``BodyReader``.
    repeats_logprobs: events of its streams repeat those of tokens that came before.  ping: see ``EventStream``."""

    operation: ClassVar[Operation]
    body_type: type[B]
    task: ClassVar[str] = "generate"
    refusal: ClassVar[str] = "it generates no text"
    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ping: ClassVar[bytes] = PING_COMMENT
    repeats_logprobs: ClassVar[bool] = False

    def __init__(self, translator: Any) -> None:
        """Make the endpoint.  translator: a ``server.openai.translator.Translator``, which has the model's card."""

    def translate(self, body: B) -> Generation:
        """Returns what the body asks for.  Raises RequestError for what cannot be asked."""

    def rename(self, field: str, body: B) -> str:
        """Returns what this endpoint's clients call a field that errors of other layers call ``field``."""
        return field

    def writer(self, body: B, generation: Generation, usage: UsageCounter) -> Writer:
        """Returns the writer of one request's answer.  usage: counts what the request has used so far."""
