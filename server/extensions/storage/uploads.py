"""A file that a client uploads, written to disk as it comes.

Owns: the parts of a multipart body, its limits in size and time.  Does not know: the table of files.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BufferedWriter
from pathlib import Path

import msgspec
from aiohttp import BodyPartReader, ContentTypeError, web
from aiohttp.http_exceptions import HttpProcessingError

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.extensions.storage.store import Store, disk_error
from server.http.body import LEAST_BYTES_PER_S, media_type

MULTIPART = "multipart/form-data"
MAX_FIELD_BYTES = 4096
MAX_FIELDS = 32
MAX_FILENAME_CHARS = 255
CHUNK_BYTES = 1 << 18


class Upload(msgspec.Struct, kw_only=True):
    """The parts of a body.  fields: the parts that are no file, by their names."""

    fields: dict[str, str] = {}
    filename: str = ""
    num_bytes: int | None = None  # of the file; None as long as there is none


def check_multipart(request: web.Request) -> None:
    """Raise RequestError (415) for a body that cannot have a file."""
    if media_type(request) != MULTIPART:
        raise RequestError(
            "a file must be sent as Content-Type: multipart/form-data", status=415, code="unsupported_media_type"
        )


@asynccontextmanager
async def received(request: web.Request, part_path: Path, server: ServerSection, most: int) -> AsyncIterator[Upload]:
    """Read a body, and its file into ``part_path``, which is removed in the end if it is still there.

    most: bytes that the file may have.  Raises RequestError: 400, 408, 413, 415, or 507 for a full disk."""
    try:
        try:
            # Opened at once: a wait for it could be cancelled, after which a thread would make the file all the same.
            with part_path.open("xb") as target:
                upload = await _read(request, target, server, most)
                await asyncio.to_thread(Store.sync, target)
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise disk_error(error) from error
        yield upload
    finally:
        part_path.unlink(missing_ok=True)  # noqa: ASYNC240 - a wait could be cancelled, and leave it


async def _read(request: web.Request, target: BufferedWriter, server: ServerSection, most: int) -> Upload:
    check_multipart(request)
    deadline, upload, num_read = asyncio.get_running_loop().time() + server.client_timeout_s, Upload(), 0
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            reader = await request.multipart()
            for _ in range(MAX_FIELDS):
                part = await reader.next()
                if part is None:
                    return upload
                if not isinstance(part, BodyPartReader):
                    raise _malformed("a part is made of parts itself")
                name = part.name or ""
                is_file = name == "file"
                if is_file:
                    if upload.num_bytes is not None:
                        raise FieldError("file", "given twice; one file is taken at a time")
                    upload.filename, upload.num_bytes = _plain(part.filename or "file"), 0
                value = bytearray()
                while chunk := await part.read_chunk(CHUNK_BYTES):
                    num_read += len(chunk)
                    timeout.reschedule(deadline + num_read / LEAST_BYTES_PER_S)
                    if is_file:
                        assert upload.num_bytes is not None
                        upload.num_bytes += len(chunk)
                        if upload.num_bytes > most:
                            raise too_large(most)
                        await asyncio.to_thread(target.write, chunk)
                        continue
                    value += chunk
                    if len(value) > MAX_FIELD_BYTES:
                        raise FieldError(_plain(name), f"longer than {MAX_FIELD_BYTES} bytes")
                if not is_file:
                    upload.fields[name] = value.decode("utf-8", "replace")
            raise _malformed(f"it has more than {MAX_FIELDS} parts")
    except TimeoutError:
        raise RequestError(
            f"the file did not arrive within {server.client_timeout_s:g} s and one more for each "
            f"{LEAST_BYTES_PER_S >> 10} KiB of it",
            status=408,
            code="body_timeout",
        ) from None
    except (ValueError, AssertionError, RuntimeError, ContentTypeError, HttpProcessingError, web.RequestPayloadError):
        raise _malformed("it is not framed as its type demands") from None


def too_large(most: int) -> RequestError:
    """The refusal of a file with more bytes than that."""
    return RequestError(f"the file is larger than {most} bytes", status=413, code="file_too_large", param="file")


def _malformed(why: str) -> RequestError:
    return RequestError(f"the multipart body cannot be read: {why}", code="malformed_body")


def _plain(name: str) -> str:
    """A client's name for a file, as text that can be shown anywhere."""
    shown = name.replace("\\", "/").rpartition("/")[2].encode("utf-8", "replace").decode()
    return "".join(char for char in shown if char.isprintable())[:MAX_FILENAME_CHARS] or "file"
