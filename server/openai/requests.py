"""Bodies that clients send, as the OpenAI API names them, plus the fields that other engines added.

Owns: field names and JSON types.  Does not know: ranges (SamplingParams has them), defaults of the model, the engine.
``None`` is "not given" throughout: client libraries send explicit nulls.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from engine.types.params import MAX_LOGPROBS, MAX_TOKEN_COUNT

# Ranges that JSON numbers must keep to whatever they are for: a longer integer is an attack on what prints it.
Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKEN_COUNT)]
Salt = Annotated[str, Meta(max_length=1024)]
Short = Annotated[str, Meta(max_length=1024)]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Scalar = bool | int | float | Short | None


# Default of a field of any kind.  Not "Raw | None": msgspec would take nothing but null for that.
not_given = partial(msgspec.Raw, b"null")


class StreamOptions(msgspec.Struct, frozen=True):
    """The parts of a stream besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# ---- what an output must look like ----------------------------------------------------------


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A named schema.  strict: the schema is always followed to the letter, so it changes nothing."""

    schema: msgspec.Raw
    name: Short | None = None
    description: str | None = None
    strict: bool | None = None


class Structure(msgspec.Struct, frozen=True):
    """A tag of a structural tag: what begins it, the schema of its content, what ends it."""

    begin: str
    schema: msgspec.Raw
    end: str


class TagContent(msgspec.Struct, frozen=True):
    """A part of a structural tag.  type: 'json_schema'."""

    type: Short
    json_schema: msgspec.Raw = msgspec.field(default_factory=not_given)


class Tag(msgspec.Struct, frozen=True):
    """The same, as xgrammar writes it."""

    begin: str
    content: TagContent
    end: str


class TriggeredTags(msgspec.Struct, frozen=True):
    """Text in which a trigger begins a tag.  type: 'triggered_tags'."""

    type: Short
    triggers: list[str] = []
    tags: list[Tag] = []
    at_least_one: bool = False
    stop_after_first: bool = False


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of an answer.

    type: 'text', 'json_object', 'json_schema' or 'structural_tag', which has structures and triggers, or a format.

    schema: of a json_object, as llama.cpp and Together have it."""

    type: Short
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=not_given)
    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    format: TriggeredTags | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """The form of an answer by the names of vLLM: exactly one of them.  structural_tag: JSON of a ResponseFormat."""

    json: msgspec.Raw = msgspec.field(default_factory=not_given)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


# ---- generation -----------------------------------------------------------------------------


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The ways to pick tokens, to stop, and to keep to a form: what every dialect calls the same."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    structural_tag: str | None = None


class GenerationBody(SamplingFields, frozen=True, kw_only=True):
    """Fields that the generating endpoints share.  sealed: fields in which nothing unknown may be asked for."""

    sealed: ClassVar[Mapping[str, type[msgspec.Struct]]] = MappingProxyType({"structured_outputs": StructuredOutputs})
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[Int] | None = None
    processed_logprobs: bool | None = None
    truncate_prompt_tokens: Int | None = None
    thinking_token_budget: Int | None = None
    max_thinking_tokens: Int | None = None
    prompt_cache_key: Short | None = None
    session_id: Short | None = None
    prompt_cache_ttl_s: Annotated[float, Meta(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    request_id: Short | None = None
    rid: Short | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=not_given)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions.  prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    suffix: str | None = None


class FunctionBody(msgspec.Struct, frozen=True):
    """A function that the model may call.  parameters: JSON Schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: FunctionBody


MAX_TURNS = 16_384  # of one conversation
MAX_PARTS = 4096  # of one message
MAX_TOOLS = 1024  # agents with several MCP servers have hundreds
Tools = Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)]


class FunctionChoice(msgspec.Struct, frozen=True):
    """A function by name."""

    name: Short


class ToolChoice(msgspec.Struct, frozen=True):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(msgspec.Struct, frozen=True):
    """A function that was called.

    arguments: a JSON object, as text or as it is; text that is none, of a call that was cut off, counts as {}."""

    name: Short
    arguments: str | dict[str, Any] | None = None


class CallBody(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier."""

    function: CalledFunction
    id: Short = ""
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content.  refusal: of an assistant that refused, in place of its text.

    image_url: a picture's address or data URI, or an object with it as ``url``; of any type, since what was answered
    may be left out.  file_id: of a picture that was uploaded.
    video_url: the same of a video.  video: a list of its frames, or the same.  fps: of the frames."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    file_id: Short | None = None
    detail: Short | None = None
    video_url: Any = None
    video: Any = None
    fps: Any = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of the conversation.  reasoning_content and reasoning are two names of one thing."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Short | None = None
    tool_calls: Annotated[list[CallBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Short | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: msgspec.Raw = msgspec.field(default_factory=not_given)


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions.  max_completion_tokens is the newer name of max_tokens and goes first."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_TURNS)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[Short, Scalar] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Short | None = None
    separate_reasoning: bool | None = None
