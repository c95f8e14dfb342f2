"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer for others, such as evaluation harnesses.

Owns: their bodies.  Does not know: the engine; nothing is generated.
Encoding runs in a worker thread, after a bound on the number of characters.
"""

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from engine.actors.admission import check_chars, num_chars
from engine.settings.sections import ServerSection
from engine.text.codec import TextCodec
from engine.types.errors import FieldError
from engine.types.prompt import ChatOptions, ChatTurn
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.conversation import HERMES, read_end, read_tools, read_turns, read_variables
from server.openai.requests import MAX_TURNS, ChatMessage, Scalar, Short, TokenId, Tools
from server.openai.translator import Translator


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of prompt and messages.  The other fields as in completions and chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_TURNS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[Short, Scalar] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    tokens: list[TokenId]
    model: str | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens.  token_strs: where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Special tokens as text; null for those that the model does not have.  chat_template: Jinja."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class TokenizationRoutes:
    """Handles these routes."""

    def __init__(self, codec: TextCodec, translator: Translator, server: ServerSection) -> None:
        self._codec = codec
        self._card = translator.card
        self._translator = translator
        self._tokenize_reader = BodyReader(TokenizeBody, self._check_tokenize, server)
        self._detokenize_reader = BodyReader(DetokenizeBody, self._check_detokenize, server)

    @operation(
        "POST",
        "/tokenize",
        "client",
        "Text as tokens.",
        also=("/v1/tokenize",),
        answer=TokenizeAnswer,
        body=TokenizeBody,
    )
    async def tokenize(self, request: web.Request) -> web.Response:
        body, turns = await self._tokenize_reader.read(request)
        if self._translator.sight is not None:
            turns = await self._translator.sight.read(turns, request[EXCHANGE])
        return json_reply(await asyncio.to_thread(self._encode, body, turns))

    @operation(
        "POST",
        "/detokenize",
        "client",
        "Tokens as text.",
        also=("/v1/detokenize",),
        answer=DetokenizeAnswer,
        body=DetokenizeBody,
    )
    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._detokenize_reader.read(request)
        text = await asyncio.to_thread(self._codec.decode, body.tokens, skip_special_tokens=False)
        return json_reply(DetokenizeAnswer(text))

    @operation("GET", "/tokenizer_info", "client", "Special tokens and the chat template.", answer=TokenizerInfo)
    async def info(self, request: web.Request) -> web.Response:
        named = self._codec.named_tokens
        return json_reply(
            TokenizerInfo(
                bos_token=named.get("bos_token"),
                eos_token=named.get("eos_token"),
                pad_token=named.get("pad_token"),
                unk_token=named.get("unk_token"),
                chat_template=self._codec.template_source or None,
            )
        )

    def _check_tokenize(self, body: TokenizeBody) -> tuple[TokenizeBody, tuple[ChatTurn, ...]]:
        self._translator.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("prompt", "exactly one of prompt and messages is needed")
        if body.messages is None:
            return body, ()
        return body, read_turns(body.messages, self._card.template_roles, sees=self._translator.sees)

    def _check_detokenize(self, body: DetokenizeBody) -> DetokenizeBody:
        self._translator.check_model(body.model)
        outside = next((token for token in body.tokens if token >= self._card.vocab_size), None)
        if outside is not None:
            most = self._card.vocab_size - 1
            raise FieldError("tokens", f"token id {outside} is outside 0 to {most}")
        return body

    def _encode(self, body: TokenizeBody, turns: tuple[ChatTurn, ...]) -> TokenizeAnswer:
        token_ids = self._token_ids(body, turns)
        return TokenizeAnswer(
            count=len(token_ids),
            max_model_len=self._card.max_model_len,
            tokens=token_ids,
            token_strs=[self._codec.token_text(token_id, 0.0).text for token_id in token_ids]
            if body.return_token_strs
            else UNSET,
        )

    def _token_ids(self, body: TokenizeBody, turns: tuple[ChatTurn, ...]) -> list[int]:
        if body.prompt is not None:
            check_chars(len(body.prompt), self._card.max_model_len)
            if not body.prompt:
                return []
            special = body.add_special_tokens is not False
            ids: list[int] = self._codec.encode(body.prompt, add_special_tokens=special).tolist()
            return ids
        tools = read_tools(body.tools, None, parallel=None, form=HERMES)
        check_chars(num_chars(turns) + len(tools.described), self._card.max_model_len, "messages")
        begins, continues = read_end(body.add_generation_prompt, body.continue_final_message)
        variables = read_variables(body.chat_template_kwargs, None, self._card.template_variables)
        options = ChatOptions(tools.described, variables, begins, continues)
        ids = self._codec.encode_chat(turns, options).token_ids.tolist()
        return ids
