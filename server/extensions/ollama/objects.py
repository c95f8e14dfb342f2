"""Answers, and lines of streams, that clients of Ollama's API read.

Owns: field names.  Does not know: where the values come from.  Durations are in nanoseconds.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.types.errors import RequestError
from server.generate.output import WeightVersions
from server.http.replies import MAX_MESSAGE_CHARS, ErrorFormat

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaError(msgspec.Struct, frozen=True):
    """The whole body of an error response, and the last line of a stream that fails."""

    error: str


def ollama_error(error: RequestError) -> OllamaError:
    """Returns an error as this API has it."""
    return OllamaError(error.message[:MAX_MESSAGE_CHARS])


def ollama_errors(request_id: str) -> ErrorFormat:
    """Returns the format of a request's errors, which name no request."""
    return ollama_error


class OllamaFunction(msgspec.Struct, frozen=True):
    """A function that the model calls."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True):
    """A call.  id: the name by which a later message may refer to it."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, or the next piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaToken(msgspec.Struct, frozen=True):
    """A token and its log probability.  bytes: its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaToken, frozen=True):
    """A sampled token, and the likeliest ones in its place."""

    top_logprobs: list[OllamaToken] = []


class OllamaEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last line's own fields.

    prompt_eval_count: tokens of the prompt, cached ones too.  eval_count: tokens of the output.
    weight_versions: as in chat completions, after weights have changed."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    weight_versions: WeightVersions = UNSET


class ChatLine(OllamaEnd, frozen=True, kw_only=True):
    """POST /api/chat: a line of the stream, or the whole answer."""

    message: OllamaMessage


class GenerateLine(OllamaEnd, frozen=True, kw_only=True):
    """POST /api/generate: a line of the stream, or the whole answer."""

    response: str
    thinking: str | UnsetType = UNSET


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embed: a vector for each input, in order."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OldEmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embeddings: one vector."""

    embedding: list[float]


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model's file, as far as they are known here."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served.  size: bytes; 0, since that is not known here."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str = ""
    details: ModelDetails = ModelDetails()


class TagsAnswer(msgspec.Struct, frozen=True):
    """GET /api/tags."""

    models: list[OllamaModel]


class LoadedModel(OllamaModel, frozen=True, kw_only=True):
    """A model in memory.  expires_at: far away, since a model stays until the server ends."""

    expires_at: str
    size_vram: int = 0
    context_length: int


class LoadedAnswer(msgspec.Struct, frozen=True):
    """GET /api/ps."""

    models: list[LoadedModel]


class ShowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show."""

    modified_at: str
    license: str = ""
    modelfile: str = ""
    parameters: str
    template: str = ""
    details: ModelDetails = ModelDetails()
    model_info: dict[str, str | int]
    capabilities: list[str]


class VersionAnswer(msgspec.Struct, frozen=True):
    """GET /api/version."""

    version: str
