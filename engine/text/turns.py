"""Messages of a conversation as Python programs write them: dictionaries like those of the OpenAI API.

Owns: which keys are read, and the refusal of anything else.  Does not know: chat templates, HTTP.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.text.film_files import film_of, moving_film
from engine.text.picture_files import read_file, shown_size
from engine.types.errors import RequestError
from engine.types.prompt import DETAILS, LEAST_FPS, ChatTurn, Picture, ToolCall

Known = dict[tuple[bytes | str | Path | int, str], tuple[object, Picture]]
"""Pictures by their bytes, path or the id of a PIL image, and detail; beside each what it was read from."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


def read_conversations(conversations: Sequence[Sequence[object]]) -> list[tuple[ChatTurn, ...]]:
    """Turn the messages of conversations into turns.  A picture that several of them have is read once."""
    known: Known = {}
    return [tuple(read_turn(one, known) for one in messages) for messages in conversations]


def read_turn(message: object, known: Known | None = None) -> ChatTurn:
    """Turn a message into a ``ChatTurn``.  Raises RequestError if it is no message.

    known: pictures that were read before, to which those of the message are added.

    The content may be a list of parts: {'type': 'text', 'text': text} and {'type': 'image', 'image': picture}, a
    picture being a path, the bytes of a file, or a PIL image; with 'detail': 'low' it has fewer tokens, if the model
    has a way for that.  {'type': 'video', 'video': film} is a path or the bytes of a moving GIF, WebP or PNG, or a list
    of pictures, with 'fps': number for its frames a second."""
    if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple):
        return _read_parts(message, message["content"], {} if known is None else known)
    try:
        read = msgspec.json.decode(msgspec.json.encode(message, enc_hook=_as_plain_text), type=_Message)
        calls = tuple(map(_read_call, read.tool_calls or ()))
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"messages: {error}; not {message!r:.100}") from None
    reasoning = read.reasoning_content or read.reasoning or ""
    if read.content is None and not calls and not reasoning:
        raise RequestError(f"messages: each must be {{'role': text, 'content': text}}, not {message!r:.100}")
    return ChatTurn(
        read.role,
        read.content or "",
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=read.tool_call_id or "",
        name=read.name or "",
    )


def _read_parts(message: Mapping[str, Any], parts: Sequence[Any], known: Known) -> ChatTurn:
    text, pictures, places = "", [], []
    for part in parts:
        match part:
            case {"type": "text", "text": str(more)}:
                text += more
            case {"type": "image", "image": image}:
                pictures.append(_read_picture(image, part.get("detail", "auto"), known))
                places.append(len(text))
            case {"type": "video", "video": film}:
                pictures.append(_read_film(film, part.get("fps", 0.0)))
                places.append(len(text))
            case _:
                allowed = (
                    "{'type': 'text', 'text': text}, {'type': 'image', 'image': path, bytes or PIL image} or "
                    "{'type': 'video', 'video': path, bytes or list of images}"
                )
                raise RequestError(f"messages: a part of a content must be {allowed}, not {part!r:.100}")
    turn = read_turn({**message, "content": text})
    return msgspec.structs.replace(turn, pictures=tuple(pictures), places=tuple(places))


def _read_picture(image: object, detail: object, known: Known) -> Picture:
    if detail not in DETAILS:
        raise RequestError(f"messages: the detail of a picture must be one of {', '.join(DETAILS)}, not {detail!r:.40}")
    name = (image if isinstance(image, bytes | str | Path) else id(image), str(detail))
    if name not in known:
        data = read_file(image)
        known[name] = image, Picture(data, hashlib.sha256(data).hexdigest(), *shown_size(data), str(detail))
    return known[name][1]


def _read_film(given: object, fps: object) -> Picture:
    if not isinstance(fps, int | float) or (fps and not LEAST_FPS <= fps < math.inf):
        raise RequestError(
            f"messages: the fps of a video must be a number of frames a second of at least {LEAST_FPS}, not {fps!r:.40}"
        )
    if isinstance(given, list | tuple):
        files = [read_file(one) for one in given]
        film, (width, height) = film_of(files, [shown_size(one) for one in files], float(fps))
    else:
        film, (width, height) = moving_film(read_file(given))
    data = film.packed()
    return Picture(data, hashlib.sha256(data).hexdigest(), width, height, film=film.film)


def _as_plain_text(value: object) -> str:
    """Return the text of a subclass of ``str``, which messages between processes cannot hold."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a {type(value).__name__} is neither text nor a table")


def _read_call(call: _Call) -> ToolCall:
    given = call.function.arguments
    arguments = given if isinstance(given, dict) else msgspec.json.decode(given or "{}", type=dict[str, Any])
    return ToolCall(call.id, call.function.name, msgspec.json.encode(arguments).decode())
