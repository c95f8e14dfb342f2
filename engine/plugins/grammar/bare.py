"""Arguments that are written without the quotes of JSON: which texts a schema allows there.

Owns: whether a value is written as text, and which texts there are.  Does not know: grammars, formats of calls.
"""

from typing import Any

import msgspec

from engine.plugins.grammar.checks import resolved


def bare_texts(root: Any, schema: Any) -> list[str] | None:
    """Return the texts that a value may be; an empty list for JSON, None for any text.

    root: the schema that references in ``schema`` lead into.  What may be a string is text, without its pattern or
    format.  Of listed values each is one text."""
    seen = 0
    while isinstance(schema, dict) and "$ref" in schema and seen < 8:
        try:
            schema = resolved(root, schema["$ref"])
        except LookupError:
            return []
        seen += 1
    if not isinstance(schema, dict):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and listed and any(isinstance(one, str) for one in listed):
        return list(dict.fromkeys(_text(one) for one in listed))
    kinds = _types(schema)
    return None if not kinds or "string" in kinds else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema names; none if it, or one of its alternatives, may be any.

    What is no type has a name as well, so that the schema is refused as one of JSON."""
    given = schema.get("type")
    if given is not None:
        return set(map(str, given)) if isinstance(given, list) else {str(given)}
    if isinstance(schema.get("enum"), list) or "const" in schema:
        return {"listed"}
    alternatives = schema.get("anyOf") or schema.get("oneOf") or []
    if not isinstance(alternatives, list):
        return {"listed"}
    each = [_types(one) if isinstance(one, dict) else set() for one in alternatives]
    return set().union(*each) if all(each) else set()
