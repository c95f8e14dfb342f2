"""The input of a request: text, token ids, or a conversation and the options that render it as text.

Owns: these records, which are fields of messages.  Does not know: chat templates, the formats of clients.
"""

from collections.abc import Sequence
from typing import Final

import msgspec


class _Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Immutable, encodable to msgpack; part of a message, not a message itself."""


class ToolCall(_Content, frozen=True):
    """A function call that the assistant made earlier in a conversation.  arguments: a JSON object as text."""

    call_id: str
    name: str
    arguments: str


DETAILS: Final = ("auto", "low", "high")


LEAST_FPS: Final = 0.00001  # of a film: the times of its frames are numbers that can be written


class Film(_Content, frozen=True):
    """The length of a film.  fps: frames a second, ``LEAST_FPS`` or more; 0 if that is not known.

    are_chosen: its frames are those to show, so that none is left out."""

    num_frames: int
    fps: float = 0.0
    are_chosen: bool = False


class Picture(_Content, frozen=True):
    """A picture in a conversation: an encoded file, whose limits were checked.

    data: PNG, JPEG, WebP or GIF; of a film, as ``FilmFile`` packs it.  digest: SHA-256 of data, in hex.
    width, height: pixels, as it is shown.  detail: one of ``DETAILS``, as the client asks.
    film: None for a picture that does not move."""

    data: bytes
    digest: str
    width: int
    height: int
    detail: str = "auto"
    film: Film | None = None

    @property
    def num_pixels(self) -> int:
        """The pixels of all its frames."""
        return self.width * self.height * (1 if self.film is None else self.film.num_frames)


class ChatTurn(_Content, frozen=True):
    """One message of a conversation.

    reasoning, tool_calls: set for the assistant.  tool_call_id: the call that a tool's message answers.
    pictures: in the order in which they stand in the content.  places: for each, the number of characters of the
    content before it.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[Picture, ...] = ()
    places: tuple[int, ...] = ()


class ChatOptions(_Content, frozen=True):
    """The options that render a conversation as a prompt and parse its answer.

    tools: JSON array of the callable functions, in the API's form; empty for no tools.
    variables: JSON object of further template variables; empty for none.
    continue_final: the answer continues the last message.
    split_reasoning: the model's thoughts are returned separately from the answer.
    """

    tools: str = ""
    variables: str = ""
    add_generation_prompt: bool = True
    continue_final: bool = False
    split_reasoning: bool = False


Prompt = str | Sequence[int] | tuple[ChatTurn, ...]


class Origin(_Content, frozen=True):
    """The sender of a request, for observers and policies.

    client: the name of its key, or its address; '' for requests of a Python program.
    request: the client's id of the request, its X-Request-Id, or a generated one.
    tenant: the account that a fair policy charges; '' if that is the client's."""

    client: str = ""
    request: str = ""
    tenant: str = ""


UNKNOWN_ORIGIN: Final = Origin()


class RequestPart(_Content, frozen=True):
    """The part of a request that a feature reads.

    digest: identifies its content, in hex; the cache keeps the KV of different digests apart.
    data: as the feature encodes it."""

    digest: str
    data: bytes = b""
