"""The common part of endpoints for models that pool: fields of a body, prompts from them, answers in one piece.

Owns: those fields, and what they ask of the engine.  Does not know: what an answer holds, which model kinds there are.
"""

import uuid
from collections.abc import Sequence
from typing import Annotated, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from engine.features.pooling.requests import Float32, PooledRequests
from engine.messages import Finish
from engine.types.errors import FieldError, RequestError
from engine.types.params import SamplingParams
from engine.types.prompt import ChatOptions, Prompt
from server.generate.endpoint import Endpoint, Writer
from server.generate.generation import Generation
from server.generate.output import Output, UsageCounter
from server.openai.completions import read_prompts
from server.openai.conversation import read_end, read_turns, read_variables
from server.openai.requests import ChatMessage, Int, Priority, Salt, Scalar, Short, TokenId
from server.openai.translator import Translator, tenant_of

F = TypeVar("F", bound="PooledFields")
MAX_INPUTS = 2048  # of one request, as the OpenAI API has it
Dimensions = Annotated[int, Meta(ge=1, le=1 << 20)]


class PooledFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all of them take.  truncate_prompt_tokens: a longer prompt loses its end; -1 for what fits.

    use_activation: false for what the model gives before the last function (of length 1, softmax, sigmoid).
    normalize, softmax, activation: what vLLM called it for one kind of model each.
    add_special_tokens: may be false for token ids and conversations alone."""

    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: str | None = None
    request_id: Short | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def activated(self) -> bool:
        """Whether the last function is wanted."""
        return False not in (self.use_activation, self.normalize, self.softmax, self.activation)


class TextInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text as Jina's clients send it."""

    text: str


Inputs = list[str | TextInput | TokenId | list[TokenId]]


class InputFields(PooledFields, frozen=True, kw_only=True):
    """Either an input, which is text, texts, token ids, or lists of token ids, or messages, which are one prompt."""

    input: str | Inputs | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[Short, Scalar] | None = None


class PooledUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: UsageCounter) -> "PooledUsage":
        """All that was read; nothing was written."""
        num_tokens = usage.total().prompt_tokens
        return cls(num_tokens, num_tokens)


class PooledTranslator:
    """Turns bodies into generations for one model."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self.card = translator.card
        self.requests = PooledRequests(self.card.use, self.card.max_model_len)

    def inputs(self, body: InputFields, *, method: str | None = None, prompt_name: str | None = None) -> Generation:
        """Returns what a body asks with an input or with messages.  Raises RequestError."""
        chat = ChatOptions()
        if body.input is None and body.messages is not None:
            begins, continues = read_end(bool(body.add_generation_prompt), body.continue_final_message)
            variables = read_variables(body.chat_template_kwargs, None, self.card.template_variables)
            chat = ChatOptions(variables=variables, add_generation_prompt=begins, continue_final=continues)
            prompts: tuple[Prompt, ...] = (read_turns(body.messages),)
        elif body.input is None or body.messages is not None:
            raise FieldError("input", "exactly one of input and messages is needed")
        else:
            prompts = read_prompts(_plain(body.input), "input")
        named = self.requests.prompts(prompts, prompt_name)
        return self.generation(body, named, self.requests.params(method), "input", chat)

    def generation(
        self,
        body: PooledFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        counted: str,
        chat: ChatOptions = ChatOptions(),  # noqa: B008 (immutable)
    ) -> Generation:
        """Returns what prompts ask.  counted: the field that has them.  Raises RequestError."""
        self._translator.check_model(body.model)
        if body.add_special_tokens is False and (counted != "input" or any(isinstance(one, str) for one in prompts)):
            raise FieldError("add_special_tokens", "false, but texts are read with the tokenizer's own; send token ids")
        if len(prompts) > MAX_INPUTS:
            raise FieldError(counted, f"{len(prompts)} of them; at most {MAX_INPUTS} are allowed in one request")
        options = self.requests.options(body.truncate_prompt_tokens, body.priority or 0, body.cache_salt or "")
        return Generation(
            prompts=tuple(prompts),
            params=params,
            options=msgspec.structs.replace(
                options, chat=chat, origin=tenant_of(body.user), parts=self._translator.parts_of(body.model)
            ),
            request_id=body.request_id or "",
        )


class PooledEndpoint(Endpoint[F]):
    """An endpoint of a model that pools.  id_prefix: of its answers; "" if they have no id."""

    id_prefix: ClassVar[str] = ""

    def __init__(self, translator: Translator) -> None:
        self.translator = PooledTranslator(translator)

    def rename(self, field: str, body: F) -> str:
        return "input" if field == "prompt" else field

    def writer(self, body: F, generation: Generation, usage: UsageCounter) -> "PooledWriter[F]":
        return PooledWriter(self, body, usage)

    def answer(self, name: str, body: F, outputs: list[bytes], usage: PooledUsage) -> object:
        """Returns the answer that is called ``name``.  outputs: what the engine gave for each prompt."""
        raise NotImplementedError


class PooledWriter(Writer, Generic[F]):
    """Writes what the endpoint makes of all outputs."""

    def __init__(self, endpoint: PooledEndpoint[F], body: F, usage: UsageCounter) -> None:
        self.id = endpoint.id_prefix and endpoint.id_prefix + uuid.uuid4().hex
        self._endpoint = endpoint
        self._body = body
        self._usage = usage

    def whole(self, outputs: Sequence[Output]) -> object:
        return self._endpoint.answer(self.id, self._body, pooled(outputs), PooledUsage.of(self._usage))


def _plain(given: str | Inputs) -> str | list[str | TokenId | list[TokenId]]:
    """Returns an input without the objects around its texts."""
    return given if isinstance(given, str) else [one.text if isinstance(one, TextInput) else one for one in given]


def pooled(outputs: Sequence[Output]) -> list[bytes]:
    """Returns what the engine gave for each prompt.  Raises RequestError if one was aborted: half an answer is none."""
    deltas = [output.delta for output in outputs]
    if any(delta.finish == Finish.ABORT for delta in deltas):
        raise RequestError("the request was aborted", status=409, code="aborted")
    return [delta.result for delta in deltas]


def numbers(data: Float32) -> list[float]:
    """Returns numbers as JSON has them."""
    listed: list[float] = data.astype(np.float32).tolist()
    return listed
