"""A request's body: read within limits, decoded into a typed struct, turned into what it asks for.

Owns: size and time limits of reading, what JSON may look like, how a bad field is named.
Does not know: which fields there are, or what they mean.
"""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from engine.config import ServerSection
from engine.errors import RequestError
from server.unsupported import check_unsupported

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

LARGE_BODY_BYTES = 64 << 10  # up to here decoding and translating take the event loop under a millisecond


class BodyReader(Generic[B, T]):
    """Reads bodies of one type and hands each to ``translate``, which may raise RequestError.

    elsewhere: fields that mean something only inside of another one, which is named."""

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
        self._max_bytes = server.max_body_bytes
        self._timeout_s = server.body_timeout_s

    async def read(self, request: web.Request) -> T:
        """What the body asks for.  Raises RequestError: 400, 408, 413 or 415."""
        self._check_headers(request)
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._collect(request)
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {self._timeout_s:g} s", status=408, code="body_timeout"
            ) from None
        except web.RequestPayloadError:
            raise RequestError("the body is not framed as HTTP demands", code="malformed_body") from None
        if len(body) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(self._understand, body)
        return self._understand(body)

    def _check_headers(self, request: web.Request) -> None:
        for coding in request.headers.getall("Content-Encoding", ()):
            if coding.strip().lower() != "identity":
                raise RequestError(
                    "compressed bodies are not taken; send the JSON as it is", status=415, code="unsupported_encoding"
                )
        media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        # Other types could come from any web page without the browser asking this server first.
        if media_type != "application/json":
            raise RequestError(
                "the body must be sent as Content-Type: application/json", status=415, code="unsupported_media_type"
            )
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large()

    async def _collect(self, request: web.Request) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := await request.content.readany():
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            chunks.append(chunk)
        return b"".join(chunks)

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than {self._max_bytes} bytes", status=413, code="body_too_large")

    def _understand(self, body: bytes) -> T:
        return self._translate(self._decode(body))

    def _decode(self, body: bytes) -> B:
        try:
            fields = self._fields.decode(body)
            for name in self._elsewhere.keys() & fields.keys():
                raise RequestError(f"{name}: belongs into {self._elsewhere[name]}", param=name)
            check_unsupported(fields, self._known)
            return self._struct.decode(body)
        except msgspec.ValidationError as error:
            message, param = name_field(str(error))
            raise RequestError(message, param=param) from None
        except msgspec.MsgspecError as error:
            raise RequestError(f"the body is not valid JSON: {error}", code="malformed_json") from None
        except UnicodeDecodeError:
            raise RequestError("the body is not valid UTF-8", code="malformed_json") from None
        except RecursionError:
            raise RequestError("the body is nested too deeply", code="malformed_json") from None


def name_field(complaint: str) -> tuple[str, str | None]:
    """msgspec's complaint as (message, JSON path of the field)."""
    reason, _, where = complaint.partition(" - at ")
    path = where[where.find("$") :].rstrip("`").removeprefix("$").removeprefix(".")
    missing = reason.partition("missing required field `")[2].rstrip("`")
    if missing:
        path = f"{path}.{missing}" if path else missing
        return f"{path}: required, but not given", path
    reason = reason.replace("`", "")
    return (f"{path}: {reason}" if path else f"the body: {reason}"), path or None
