"""Parts of JSON Schemas that no grammar expresses: they are left out of it, and whole values are judged by them.

Owns: which keywords these are, the schema without them, the judgement of a value.
Does not know: grammars, tokens, where a value is in an output.

A pattern or a format is a part of the grammar and is not judged.  So a schema in which the judgement would depend on
one, inside of ``not`` for example, is left whole, and is refused.
"""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from engine.plugins.grammar.schemas import FORMATS, parts

JUDGED: Final = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "dependentRequired",
    "dependentSchemas", "dependencies",
})  # fmt: skip
_SPELT: Final = frozenset({
    "pattern", "patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef", "$id",
})  # fmt: skip
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains"), (dict, bool)),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), (dict,)),
    **dict.fromkeys(("minContains", "maxContains"), (int,)),
    "uniqueItems": (bool,),
}
_UNIONS: Final = ("anyOf", "oneOf")
_MAX_WORK: Final = 100_000  # schemas that a judgement compares with a value
_BOUNDS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES: Final = {"Length": str, "Items": list, "Properties": dict}


class Unjudged(Exception):
    """Raised for a value that cannot be judged, with the reason."""


class _Place(NamedTuple):
    """A value and the schema that it must have.  path: from the whole value, for messages."""

    value: Any
    schema: Any
    path: str


class Judge:
    """The judgement of values by one schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._work = 0

    def fault(self, value: Any) -> str:
        """Return the place and the keyword that a value breaks first; '' if it follows the schema.  Raises Unjudged."""
        self._work = 0
        try:
            return self._fault(_Place(value, self._root, ""))
        except RecursionError:
            raise Unjudged("it is nested too deep to be checked") from None
        except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            raise Unjudged(f"a keyword of it has a value that makes no sense: {error}") from None

    def _fault(self, place: _Place) -> str:
        self._work += 1
        if self._work > _MAX_WORK:
            raise Unjudged("it takes too much work to check")
        value, schema, path = place
        where = path.removeprefix(".") or "the value"
        if not isinstance(schema, dict):
            return f"{where}: nothing is allowed here" if schema is False else ""
        for keyword, wanted in schema.items():
            if not self._holds(keyword, wanted, value, schema):
                return f"{where}: {keyword}"
            for inner in self._inner(keyword, wanted, place):
                if found := self._fault(inner):
                    return found
        return ""

    def _follows(self, value: Any, schema: Any) -> bool:
        return not self._fault(_Place(value, schema, ""))

    def _holds(self, keyword: str, wanted: Any, value: Any, schema: dict[str, Any]) -> bool:
        match keyword:
            case "type":
                return any(_is(value, kind) for kind in (wanted if isinstance(wanted, list) else [wanted]))
            case "enum":
                return any(_canonical(one) == _canonical(value) for one in wanted)
            case "const":
                return _canonical(wanted) == _canonical(value)
            case "anyOf":
                return any(self._follows(value, one) for one in wanted)
            case "oneOf":
                return sum(self._follows(value, one) for one in wanted) == 1
            case "not":
                return not self._follows(value, wanted)
            case "required" if isinstance(value, dict):
                return all(name in value for name in wanted)
            case "dependentRequired" | "dependencies" if isinstance(value, dict):
                lists = {name: names for name, names in wanted.items() if isinstance(names, list)}
                return all(one in value for name, names in lists.items() if name in value for one in names)
            case "contains" if isinstance(value, list):
                count = sum(self._follows(one, wanted) for one in value)
                return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf))
            case "uniqueItems" if wanted is True and isinstance(value, list):
                return len({_canonical(one) for one in value}) == len(value)
        return _keeps_bounds(keyword, wanted, value)

    def _inner(self, keyword: str, wanted: Any, place: _Place) -> Iterator[_Place]:
        """Yield the values that a keyword describes by schemas of their own, all of which must be followed."""
        value, schema, path = place
        match keyword:
            case "$ref":
                yield place._replace(schema=resolved(self._root, wanted))
            case "allOf":
                yield from (place._replace(schema=one) for one in wanted)
            case "if":
                then = "then" if self._follows(value, wanted) else "else"
                yield place._replace(schema=schema.get(then, True))
            case "dependentSchemas" | "dependencies" if isinstance(value, dict):
                for name, one in wanted.items():
                    if name in value and not isinstance(one, list):
                        yield place._replace(schema=one)
            case "properties" if isinstance(value, dict):
                yield from (_Place(value[name], one, f"{path}.{name}") for name, one in wanted.items() if name in value)
            case "additionalProperties" if isinstance(value, dict) and "patternProperties" not in schema:
                known = schema.get("properties", {})
                yield from (_Place(one, wanted, f"{path}.{name}") for name, one in value.items() if name not in known)
            case "prefixItems" | "items" | "additionalItems" if isinstance(value, list):
                first, each = _members(keyword, wanted, schema)
                for index, one in enumerate(value[first:], first):
                    if isinstance(each, list) and index >= len(each):
                        return
                    yield _Place(one, each[index] if isinstance(each, list) else each, f"{path}[{index}]")


def _members(keyword: str, wanted: Any, schema: dict[str, Any]) -> tuple[int, Any]:
    """Return the first member of a list that a keyword describes, and its schema or, from the first on, schemas."""
    if keyword == "items" and not isinstance(wanted, list):
        return len(schema.get("prefixItems", ())), wanted
    if keyword == "additionalItems":
        listed = schema.get("items")
        return (len(listed), wanted) if isinstance(listed, list) else (0, True)
    return 0, wanted


def _keeps_bounds(keyword: str, wanted: Any, value: Any) -> bool:
    """Return whether a value keeps to a keyword that bounds numbers or sizes; True for every other keyword."""
    if _is(value, "number") and keyword in _BOUNDS:
        return _BOUNDS[keyword](value, wanted)
    if _is(value, "number") and keyword == "multipleOf":
        return Decimal(str(value)) % Decimal(str(wanted)) == 0
    bound, size = keyword[:3], _SIZES.get(keyword[3:])
    if size is None or not isinstance(value, size):
        return True
    return len(value) >= wanted if bound == "min" else len(value) <= wanted


def _is(value: Any, kind: str) -> bool:
    match value:
        case bool():
            return kind == "boolean"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return kind == "string"
        case list():
            return kind == "array"
        case dict():
            return kind == "object"
    return kind == "null"


def _canonical(value: Any) -> bytes:
    """Return what equal values have in common: 1.0 is 1, and the order of properties means nothing."""
    return msgspec.json.encode(_plain(value), order="deterministic")


def _plain(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(one) for one in value]
        case dict():
            return {name: _plain(one) for name, one in value.items()}
    return value


def resolved(root: Any, reference: Any) -> Any:
    """Return the part of a schema that a reference names.  Raises LookupError if it names none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise LookupError(reference)
    part = root
    for step in reference[2:].split("/") if reference != "#" else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        part = part[int(name)] if isinstance(part, list) and name.isdecimal() else part[name]
    return part


def divided(schema: Any) -> tuple[Any, Judge | None]:
    """Return what a grammar can express of a simplified schema, and the judge of the rest, if there is one.

    A schema that cannot be judged is returned whole."""
    if not _leaves_some(schema) or not _can_be_judged(schema):
        return schema, None
    return _without_judged(schema), Judge(schema)


def _leaves_some(schema: Any) -> bool:
    """Return whether some keyword in the schema is judged."""
    return isinstance(schema, dict) and (
        not JUDGED.isdisjoint(schema) or any(_leaves_some(part) for _, part in parts(schema))
    )


def _without_judged(schema: Any) -> Any:
    """Return the schema without keywords that are judged."""
    match schema:
        case dict():
            plain = {}
            for key, value in schema.items():
                if key in ("const", "enum", "default", "examples"):
                    plain[key] = value
                elif key not in JUDGED or (key == "not" and value in ({}, True)):
                    plain[key] = _without_named(value) if key in _NAMED else _without_judged(value)
            return plain
        case list():
            return [_without_judged(one) for one in schema]
    return schema


_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # schemas by names


def _without_named(schemas: Any) -> Any:
    return {name: _without_judged(one) for name, one in schemas.items()} if isinstance(schemas, dict) else schemas


def _can_be_judged(root: Any) -> bool:
    """Return whether no judgement depends on text, and each reference names a part of the schema."""

    def can(schema: Any, *, inside: bool) -> bool:
        if not isinstance(schema, dict):
            return True
        if "$ref" in schema:
            try:
                named = resolved(root, schema["$ref"])
            except (LookupError, TypeError):
                return False
            if inside and _spells(named):
                return False
        if inside and _spells_here(schema):
            return False
        if any(keyword in schema and not isinstance(schema[keyword], kind) for keyword, kind in _KINDS.items()):
            return False
        for path, part in parts(schema):
            keyword = path.removeprefix(".").split(".")[0].split("[")[0]
            union = keyword in _UNIONS and any(_leaves_some(one) for one in schema[keyword])
            if not can(part, inside=inside or keyword in JUDGED or union):
                return False
        return True

    return can(root, inside=False)


def _spells_here(schema: dict[str, Any]) -> bool:
    return not _SPELT.isdisjoint(schema) or schema.get("format") in FORMATS


def _spells(schema: Any) -> bool:
    """Return whether text is described anywhere in a schema, or a reference in it leads elsewhere."""
    return isinstance(schema, dict) and (
        _spells_here(schema) or "$ref" in schema or any(_spells(part) for _, part in parts(schema))
    )
