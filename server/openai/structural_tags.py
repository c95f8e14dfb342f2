"""Structural tags: free text in which a trigger begins a tag, whose content keeps to a schema.

Owns: the two ways in which clients write them, what is refused.  Does not know: how a grammar is compiled.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.text.tool_format import CallShape, TagsShape
from engine.types.errors import FieldError
from engine.types.params import Grammar
from server.http.body import is_given, name_field
from server.openai.requests import ResponseFormat, TriggeredTags

MAX_TAGS = 128


def read_structural_tag(given: ResponseFormat, path: str) -> Grammar:
    """Returns the grammar.  path: the field that ``given`` is, for messages.  Raises RequestError."""
    if given.format is not None:
        triggers, tags = given.format.triggers, _triggered(given.format, f"{path}.format")
        shape = TagsShape(triggers, tags, given.format.at_least_one, given.format.stop_after_first)
        path += ".format"
    elif given.structures is not None and given.triggers is not None:
        tags = [
            CallShape(one.begin, _schema(one.schema, f"{path}.structures[{index}].schema"), one.end)
            for index, one in enumerate(given.structures)
        ]
        shape = TagsShape(given.triggers, tags)
    else:
        raise FieldError(path, "a structural tag needs structures and triggers, or a format")
    _check(shape, path, "structures" if given.format is None else "tags")
    return Grammar("structural_tag", msgspec.json.encode(shape).decode())


def decode_structural_tag(source: str, path: str) -> Grammar:
    """Returns the grammar of a structural tag that is JSON in a string.  Raises RequestError."""
    try:
        given = msgspec.json.decode(source, type=ResponseFormat)
    except msgspec.ValidationError as error:
        raise FieldError(path, name_field(str(error))[0]) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FieldError(path, f"not valid JSON: {error}") from None
    if given.type != "structural_tag":
        raise FieldError(f"{path}.type", "must be 'structural_tag'")
    return read_structural_tag(given, path)


def _triggered(given: TriggeredTags, path: str) -> list[CallShape]:
    if given.type != "triggered_tags":
        raise FieldError(
            f"{path}.type",
            f"'{given.type[:40]}' is not supported; send 'triggered_tags', or structures and triggers",
            code="unsupported_parameter",
        )
    shapes = []
    for index, tag in enumerate(given.tags):
        where = f"{path}.tags[{index}].content"
        if tag.content.type != "json_schema":
            raise FieldError(f"{where}.type", "only 'json_schema' is supported", code="unsupported_parameter")
        shapes.append(CallShape(tag.begin, _schema(tag.content.json_schema, f"{where}.json_schema"), tag.end))
    return shapes


def _check(shape: TagsShape, path: str, name: str) -> None:
    if not 1 <= len(shape.tags) <= MAX_TAGS:
        raise FieldError(f"{path}.{name}", f"{len(shape.tags)} tags; expected 1 to {MAX_TAGS}")
    if not shape.triggers or not all(shape.triggers):
        raise FieldError(f"{path}.triggers", "expected at least one, none of them empty")
    for index, tag in enumerate(shape.tags):
        if not _begins(tag.begin, shape.triggers):
            raise FieldError(f"{path}.{name}[{index}].begin", "must start with one of the triggers")
        if not tag.end:
            raise FieldError(f"{path}.{name}[{index}].end", "must not be empty")


def _begins(text: str, triggers: Sequence[str]) -> bool:
    return any(text.startswith(trigger) for trigger in triggers)


def _schema(raw: msgspec.Raw, path: str) -> Any:
    if not is_given(raw):
        raise FieldError(path, "required, but not given")
    schema = msgspec.json.decode(raw)
    if not isinstance(schema, dict | bool):
        raise FieldError(path, "a JSON Schema is an object or a boolean", code="invalid_grammar")
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}
