"""JSON Schemas as llguidance accepts them: without keywords that require nothing; and the path to a refused part.

Owns: the list of these keywords, counts as integers, the places of nested schemas.  Does not know: grammars, requests.

A keyword that JSON Schema does not define is an annotation, and so is a format that llguidance does not support, as by
default in the specification.  Constraints that are not supported are kept, so that they are refused.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
_SCHEMAS: Final = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
)  # fmt: skip
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_DEFINITIONS: Final = ("$defs", "definitions")
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_COUNT: Final = 1 << 53  # larger floats are not exact integers
_EMPTY: Final = ("dependencies", "dependentRequired", "dependentSchemas")
_ANNOTATIONS: Final = frozenset({"type", "title", "description", "$comment", "format", "examples", "default"})
_MAX_TRIALS: Final = 64


def simplified(schema: Any) -> Any:
    """Return the schema without keywords that require nothing, 2.0 as an integer, and property names as patterns."""
    if not isinstance(schema, dict):
        return schema
    plain = {key: value for key, value in schema.items() if not _asks_nothing(key, value, schema)}
    for key in _COUNTS:
        if isinstance(count := plain.get(key), float) and count.is_integer() and count < _MOST_COUNT:
            plain[key] = int(count)
    for key in _SCHEMAS:
        if isinstance(plain.get(key), dict):
            plain[key] = simplified(plain[key])
    for key in _LISTS:
        if isinstance(plain.get(key), list):
            plain[key] = [simplified(one) for one in plain[key]]
    for key in _MAPS:
        if isinstance(plain.get(key), dict):
            plain[key] = {name: simplified(one) for name, one in plain[key].items()}
    return _with_named_properties(plain) if "propertyNames" in plain else plain


def _asks_nothing(key: str, value: Any, schema: dict[str, Any]) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "uniqueItems":
            return value is False
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "then" | "else":
            return "if" not in schema
        case "propertyNames":
            types = isinstance(value, dict) and value.get("type", "string") == "string" and set(value) <= _ANNOTATIONS
            return value is True or types
        case _:
            return key in _EMPTY and value == {}


def _with_named_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object schema with constrained names and no described properties, with the allowed ones described."""
    names = schema["propertyNames"]
    if schema.get("properties") or schema.get("patternProperties") or not isinstance(names, dict):
        return schema
    value = schema.get("additionalProperties", {})
    words = set(names) - _ANNOTATIONS
    if names.get("type", "string") != "string" or value is False:
        return schema
    rest = {key: one for key, one in schema.items() if key != "propertyNames"}
    match names:
        case {"enum": list(listed)} if words == {"enum"}:
            described = {"properties": {name: value for name in listed if isinstance(name, str)}}
        case {"const": name} if words == {"const"}:
            described = {"properties": {name: value} if isinstance(name, str) else {}}
        case {"pattern": str(pattern)} if words == {"pattern"}:
            described = {"patternProperties": {pattern: value}}
        case _ if words and words <= {"minLength", "maxLength"} and all(type(names[word]) is int for word in words):
            span = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            described = {"patternProperties": {f"^[\\s\\S]{{{span}}}$": value}}
        case _:
            return schema
    return {**rest, **described, "additionalProperties": False}


def refused_at(schema: Any, reason_of: Callable[[Any], str], reason: str) -> str:
    """Return the path to the innermost part that is refused for this reason; '' for the schema itself.

    reason_of: returns why a schema is refused; '' if it is not."""
    definitions = {key: schema[key] for key in _DEFINITIONS if isinstance(schema, dict) and key in schema}
    path: list[str] = []
    num_trials = 0
    deeper = True
    while deeper:
        deeper = False
        for name, part in parts(schema):
            num_trials += 1
            if num_trials > _MAX_TRIALS:
                break
            if reason_of({**definitions, **part}) == reason and part != schema:
                path.append(name)
                schema, deeper = part, True
                break
    return "".join(path).removeprefix(".")


def parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and content of each schema directly inside a schema."""
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                if isinstance(part, dict):
                    yield f".{key}.{name}" if re.fullmatch(r"\w+", name) else f".{key}[{name!r}]", part
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                if isinstance(part, dict):
                    yield f".{key}[{index}]", part
    for key in _SCHEMAS:
        if isinstance(schema.get(key), dict):
            yield f".{key}", schema[key]
