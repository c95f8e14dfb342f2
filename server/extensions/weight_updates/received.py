"""Tensors that come in a request's body: as a file of safetensors, or as base64 in JSON.

Owns: how they get into memory, and the limits of that.  Does not know: engines, routes.
"""

import asyncio
import base64
import binascii
import os
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from engine.features.weight_updates.memory import TensorBytes, new_memory, seal, write_tensors
from engine.features.weight_updates.messages import Announced
from engine.types.errors import FieldError, RequestError
from server.http.body import LEAST_BYTES_PER_S

BODY_TYPE: Final = "application/octet-stream"


async def body_in_memory(request: web.Request, most: int, timeout_s: float) -> int:
    """Return sealed memory with a body.  Raises RequestError: 400, 408 or 413.

    most: bytes that it may have.  timeout_s: in which it comes, and a second more for each 64 KiB."""
    memory, num_bytes = new_memory(), 0
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            while chunk := await request.content.readany():
                num_bytes += len(chunk)
                if num_bytes > most:
                    raise RequestError(f"weights of more than {most} bytes", status=413, code="body_too_large")
                view = memoryview(chunk)
                while view:
                    view = view[os.write(memory, view) :]
                timeout.reschedule(deadline + num_bytes / LEAST_BYTES_PER_S)
        seal(memory)
    except TimeoutError:
        os.close(memory)
        raise RequestError("the body did not arrive in time", status=408, code="body_timeout") from None
    except web.RequestPayloadError:
        os.close(memory)
        raise RequestError("the body is not framed as HTTP demands", code="malformed_body") from None
    except BaseException:
        os.close(memory)
        raise
    return memory


def decoded(field: str, text: str) -> bytes:
    """Return the bytes of base64.  Raises FieldError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FieldError(field, "not valid base64") from None


def bytes_in_memory(content: bytes) -> int:
    """Return sealed memory with bytes."""
    memory = new_memory()
    os.write(memory, content)
    seal(memory)
    return memory


def tensors_in_memory(announced: Sequence[Announced], widths: list[int], content: bytes) -> int:
    """Return sealed memory with tensors whose bytes follow one another.  widths: bytes of each.  Raises FieldError."""
    if sum(widths) != len(content):
        raise FieldError("update_info.data", f"has {len(content)} bytes, but the tensors have {sum(widths)}")
    parts, at, view = {}, 0, memoryview(content)
    for (name, dtype, shape), width in zip(announced, widths, strict=True):
        parts[name] = TensorBytes(dtype, shape, view[at : at + width])
        at += width
    return write_tensors(parts, {})
