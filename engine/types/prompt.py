"""What a request is answered to: text, token ids, or a conversation and how it becomes text.

Owns: these records, which messages carry.  Does not know: chat templates, the formats of clients.
"""

from collections.abc import Sequence
from typing import Final

import msgspec


class _Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Immutable, encodable to msgpack; a part of messages and none itself."""


class ToolCall(_Content, frozen=True):
    """A function that the assistant called earlier in a conversation.  arguments: a JSON object as text."""

    call_id: str
    name: str
    arguments: str


class ChatTurn(_Content, frozen=True):
    """One message of a conversation.

    reasoning, tool_calls: of the assistant.  tool_call_id: which call a tool's message answers.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ChatOptions(_Content, frozen=True):
    """How a conversation becomes a prompt, and how its answer is read.

    tools: JSON array of what may be called, as the API has it; empty for none.  variables: JSON object of what else the
    template is told; empty for nothing.  continue_final: the answer goes on where the last message ends.
    split_reasoning: what the model thinks before it answers is told apart from the answer.
    """

    tools: str = ""
    variables: str = ""
    add_generation_prompt: bool = True
    continue_final: bool = False
    split_reasoning: bool = False


Prompt = str | Sequence[int] | tuple[ChatTurn, ...]


class Origin(_Content, frozen=True):
    """Who asks, for those who observe.  client: the name of its key, or its address; '' for a program's own requests.
    request: what it calls the request, its X-Request-Id or one that was drawn for it.
    tenant: whose share of the engine it uses, where a policy shares it out; '' if that is the client's."""

    client: str = ""
    request: str = ""
    tenant: str = ""


NOBODY: Final = Origin()


class Adapter(_Content, frozen=True):
    """A LoRA adapter (Hu et al. 2021) as requests name it: by its content, whatever its name.

    digest: SHA-256 of its files, in hex; what the cache tells weights apart by.  path: absolute, of its directory."""

    digest: str
    path: str
