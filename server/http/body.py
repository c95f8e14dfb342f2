"""A request's body: read within limits, decoded into a typed struct, turned into what it asks for.

Owns: size and time limits of reading, what JSON may look like, how a bad field is named, and the names of fields that
would change the output and that this server cannot honour.
Does not know: the fields that it can honour, or what they mean.
Other unknown fields are let through where client libraries add some; but output that silently ignores a constraint
looks right and is wrong, so those are refused by name.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.http.bodies import FREE_BYTES, Bodies, Share
from server.http.exchange import EXCHANGE

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})  # of any field below
# Field -> which other values are neutral.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "allowed_token_ids", "audio", "audio_data", "bad_words", "chat_template", "container",
        "custom_logit_processor", "documents", "echo", "extra_key", "functions", "grammar", "image_data",
        "input_embeds", "label_token_ids", "logits_processors", "logprob_token_ids", "lora_path", "max_new_tokens",
        "mcp_servers", "min_new_tokens", "no_stop_trim", "prompt_embeds", "prompt_logprobs", "return_hidden_states",
        "session_params", "stop_regex", "structural_tag", "suffix", "thinking_token_budget", "token_ids_logprob",
        "tools", "truncate_prompt_tokens", "use_beam_search", "video_data", "web_search_options",
    ), ()),
    "best_of": (1,), "embed_dtype": ("float32",), "function_call": ("none", "auto"), "modalities": (["text"],),
    "padding": ("do_not_pad",), "truncation_side": ("right",),
}  # fmt: skip
# The same for members of objects that are checked as a whole.
NEUTRAL_MEMBERS = {"disable_fallback": (True,), "stream_interval": (1,)}
NO_VISION = "not served: images belong in the messages of a conversation, and no sound or video is read"
UNSUPPORTED_REASONS = {
    **dict.fromkeys(("image_data", "audio_data", "video_data"), NO_VISION),
    "use_beam_search": "not supported: this server samples; best_of picks the likeliest of several outputs",
    "stop_regex": "not supported: an expression of a client may take exponential time; send strings as stop",
}
UNSUPPORTED_PREFIX = "guided_"
MAX_NESTING = 128
STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]')
LEAST_BYTES_PER_S = 64 << 10  # of a body that takes longer than ``client_timeout_s``
JSON_TYPE = "application/json"
ROUTED_TYPE = "application/vnd.callboard.routed+json"
MOST_ORIGIN_BYTES = 8 << 20  # what a router sends of a request's output so far: 5 bytes a token
LARGE_BODY_BYTES = 64 << 10  # up to here decoding and translating take the event loop under a millisecond


class Routed(msgspec.Struct, frozen=True):
    """A body that a router has sent on.  origin: see ``Origin``."""

    request: msgspec.Raw
    origin: msgspec.Raw


class _Object(msgspec.Struct):
    """A body of any fields."""


ORIGIN: web.RequestKey[msgspec.Raw] = web.RequestKey("origin", msgspec.Raw)


def check_unsupported(fields: Mapping[str, msgspec.Raw], known: Collection[str]) -> None:
    """Raise RequestError for the first field that asks for what cannot be done.  known: fields of the body's type."""
    for name, raw in fields.items():
        if name in UNSUPPORTED or name.startswith(UNSUPPORTED_PREFIX):
            _check_field(name, raw, known)


def check_sealed(outer: str, raw: msgspec.Raw, known: Collection[str]) -> None:
    """Do so for every field of the objects that ``raw`` is, where clients send what they mean and nothing else.

    outer: the field that holds them."""
    if not is_given(raw):
        return
    for fields in _objects(raw):
        for name, value in fields.items():
            _check_field(name, value, known, f"{outer}.")


def _objects(raw: msgspec.Raw) -> Sequence[Mapping[str, msgspec.Raw]]:
    try:
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])
    except msgspec.ValidationError:
        return ()  # of a wrong type, which is said where the type is known
    return [given] if isinstance(given, dict) else given


def _check_field(name: str, raw: msgspec.Raw, known: Collection[str], prefix: str = "") -> None:
    if name in known:
        return
    value = msgspec.json.decode(raw)
    also_neutral = (*UNSUPPORTED.get(name, ()), *(NEUTRAL_MEMBERS.get(name, ()) if prefix else ()))
    # The types are compared too, since False == 0 and True == 1.
    neutral = (type(value) is type(one) and value == one for one in (*NEUTRAL, *also_neutral))
    if not any(neutral):
        raise FieldError(
            prefix + name[:100],
            UNSUPPORTED_REASONS.get(name, "not supported by this server, and ignoring it would change the output"),
            code="unsupported_parameter",
        )


class BodyReader(Generic[B, T]):
    """Reads bodies of one type and hands each to ``translate``, which may raise RequestError.

    elsewhere: fields that mean something only inside of another one, which is named.
    Large bodies are understood in a thread, one after the other, for at most half of the time: a thread that decodes
    keeps the interpreter's lock, and so the event loop waiting.
    A body whose type forbids unknown fields is refused with one; no client library adds any to those.
    A body's ``sealed`` fields hold objects of these types and are checked as a whole, see ``check_sealed``."""

    def __init__(
        self,
        body_type: type[B],
        translate: Callable[[B], T],
        server: ServerSection,
        *,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._elsewhere = elsewhere
        self._translate = translate
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._struct = msgspec.json.Decoder(body_type)
        self._known = frozenset(body_type.__struct_fields__)
        self._is_closed = body_type.__struct_config__.forbid_unknown_fields
        self._sealed: Mapping[str, type[msgspec.Struct]] = getattr(body_type, "sealed", {})
        self._server = server
        self._large = asyncio.Semaphore()

    async def read(self, request: web.Request) -> T:
        """Returns what the body asks for.  Raises RequestError: 400, 408, 413 or 415."""
        return await self.understand(await self.receive(request))

    async def receive(self, request: web.Request) -> bytes:
        """Returns the body as it came.  Raises RequestError: 400, 408, 413 or 415.

        Of one that a router has sent on, the request has the ``ORIGIN`` then."""
        is_routed = check_headers(request) == ROUTED_TYPE
        body = await collect(request, self._server, MOST_ORIGIN_BYTES if is_routed else 0)
        if is_routed:
            try:
                routed = msgspec.json.decode(body, type=Routed)
            except msgspec.MsgspecError as error:
                raise RequestError(f"not what a router sends: {error}", code="malformed_json") from None
            except RecursionError:
                raise _too_deep() from None
            request[ORIGIN] = routed.origin
            body = bytes(routed.request)
            if len(body) > self._server.max_body_bytes:
                raise _too_large(self._server.max_body_bytes)
        return body

    async def understand(self, body: bytes) -> T:
        """Returns what a body asks for.  Raises RequestError (400)."""
        if len(body) <= LARGE_BODY_BYTES:
            return self._understand(body)
        loop = asyncio.get_running_loop()
        await self._large.acquire()
        began = loop.time()
        try:
            return await asyncio.to_thread(self._understand, body)
        finally:
            loop.call_later(loop.time() - began, self._large.release)

    def _understand(self, body: bytes) -> T:
        return self._translate(self._decode(body))

    def _decode(self, body: bytes) -> B:
        try:
            body.decode()  # what is kept as it came, such as schemas, would show it only later
            fields = self._fields.decode(body)
            for name in self._elsewhere.keys() & fields.keys():
                if is_given(fields[name]):
                    raise FieldError(name, f"belongs in {self._elsewhere[name]}")
            check_unsupported(fields, self._known)
            if self._is_closed and (unknown := min(fields.keys() - self._known, default=None)) is not None:
                known = ", ".join(sorted(self._known))
                raise FieldError(unknown[:100], f"no such field; there are {known}", code="unknown_parameter")
            for name in self._sealed.keys() & fields.keys():
                check_sealed(name, fields[name], self._sealed[name].__struct_fields__)
            understood = self._struct.decode(body)
            check_nesting(body)
        except msgspec.ValidationError as error:
            message, param = name_field(str(error))
            raise RequestError(message, param=param) from None
        except msgspec.MsgspecError as error:
            raise RequestError(f"the body is not valid JSON: {error}", code="malformed_json") from None
        except UnicodeDecodeError:
            raise RequestError("the body is not valid UTF-8", code="malformed_json") from None
        except RecursionError:
            raise _too_deep() from None
        return understood


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field of any kind was there, and not null."""
    return bytes(raw) != b"null"


async def collect(request: web.Request, server: ServerSection, num_more_bytes: int = 0) -> bytes:
    """Returns the whole body.  Raises RequestError: 400, 408 or 413.  num_more_bytes: that it may have here.

    Its time grows with what has come: an upload over a slow line is served, and a drip gains nothing by each byte."""
    most, timeout_s = server.max_body_bytes + num_more_bytes, server.client_timeout_s
    body = bytearray()
    exchange = request[EXCHANGE]
    share: Share | None = None
    try:
        if request.content_length is not None and request.content_length > most:
            raise _too_large(most)
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with asyncio.timeout_at(deadline) as timeout:
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > most:
                    raise _too_large(most)
                if len(body) > FREE_BYTES:
                    share = share or (exchange.bodies or Bodies()).share(exchange.client, server)
                    share.hold(len(body))
                timeout.reschedule(deadline + len(body) / LEAST_BYTES_PER_S)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {timeout_s:g} s and one more for each {LEAST_BYTES_PER_S >> 10} KiB of it",
            status=408,
            code="body_timeout",
        ) from None
    except web.RequestPayloadError:
        raise RequestError("the body is not framed as HTTP demands", code="malformed_body") from None
    finally:
        if share is not None:
            share.close()
    return bytes(body)


def check_nesting(body: bytes) -> None:
    """Raise RequestError if valid JSON is nested deeper than any schema is.

    Here once for all: what is kept as it came is read and written again later, inside of something else."""
    if body.count(b"{") + body.count(b"[") <= MAX_NESTING:
        return
    depth = 0
    for found in STRING_OR_BRACKET.finditer(body):
        match body[found.start()]:
            case 0x7B | 0x5B:
                depth += 1
                if depth > MAX_NESTING:
                    raise _too_deep()
            case 0x7D | 0x5D:
                depth -= 1


def media_type(request: web.Request) -> str:
    """Returns the type of a body, without its parameters."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def is_object(body: bytes) -> bool:
    """Whether a body is an object of JSON, whatever is in it."""
    try:
        msgspec.json.decode(body, type=_Object)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def check_headers(request: web.Request) -> str:
    """Returns the body's type.  Raises RequestError (415) for one that is not taken."""
    for coding in request.headers.getall("Content-Encoding", ()):
        if coding.strip().lower() != "identity":
            raise RequestError(
                "compressed bodies are not taken; send the JSON as it is", status=415, code="unsupported_encoding"
            )
    given = media_type(request)
    # Other types could come from any web page without the browser asking this server first.
    if given not in (JSON_TYPE, ROUTED_TYPE):
        raise RequestError(
            "the body must be sent as Content-Type: application/json", status=415, code="unsupported_media_type"
        )
    return given


def _too_large(most: int) -> RequestError:
    return RequestError(f"the body is larger than {most} bytes", status=413, code="body_too_large")


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested deeper than {MAX_NESTING} levels", code="malformed_json")


def name_field(complaint: str) -> tuple[str, str | None]:
    """Returns msgspec's complaint as (message, JSON path of the field)."""
    reason, _, where = complaint.partition(" - at ")
    path = where[where.find("$") :].rstrip("`").removeprefix("$").removeprefix(".")
    missing = reason.partition("missing required field `")[2].rstrip("`")
    if missing:
        path = f"{path}.{missing}" if path else missing
        names = "; GET /v1/models lists what this server has" if path == "model" else ""
        return f"{path}: required, but not given{names}", path
    reason = reason.replace("`", "")
    return (f"{path}: {reason}" if path else f"the body: {reason}"), path or None
