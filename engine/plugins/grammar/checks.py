"""Parts of JSON Schemas that no grammar expresses: they are left out of it, and whole values are judged by them.

Owns: which keywords these are, the schema without them, the judgement of a value.
Does not know: grammars, tokens, where a value is in an output.

A pattern or a format is a part of the grammar and is not judged.  So a schema in which the judgement would depend on
one, inside of ``not`` for example, is left whole, and is refused.  No library judges, since none bounds its work, and
since each would have ``re`` run the pattern of a client.
"""

import math
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from fractions import Fraction
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from engine.plugins.grammar.schemas import parts

JUDGED: Final = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else", "dependentRequired",
    "dependentSchemas", "dependencies",
})  # fmt: skip
_SPELT: Final = frozenset({
    "pattern", "format", "patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef", "$id",
})  # fmt: skip
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains"), (dict, bool)),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), (dict,)),
    **dict.fromkeys(("minContains", "maxContains"), (int,)),
    "uniqueItems": (bool,),
}
_UNIONS: Final = ("anyOf", "oneOf")
_MAX_WORK: Final = 20_000  # comparisons in one judgement
_MAX_DEPTH: Final = 150  # schemas around each other; each takes up to 5 of the 1,000 calls that Python allows
_MOST_INDEX_DIGITS: Final = 9  # in a reference
_CHARACTERS: Final = 64  # or bits of an integer, read in about the time of a comparison
_UNREAD: Final = frozenset({"$defs", "definitions", "default", "examples", "const", "enum"})  # or counted when read
_BOUNDS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES: Final = {"Length": str, "Items": list, "Properties": dict}
_TOO_DEEP: Final = f"it is nested deeper than {_MAX_DEPTH} schemas, too deep to check; make the schema flatter"


class Unjudged(Exception):
    """Raised for a value that cannot be judged, with the reason."""


class _Place(NamedTuple):
    """A value and the schema that it must have.  path: from the whole value, for messages."""

    value: Any
    schema: Any
    path: str


class Judge:
    """The judgement of values by one schema; any thread may call it.

    spelling: ids of the schemas in it that depend on text; of such alternatives several may seem to be followed."""

    def __init__(self, schema: Any, spelling: Set[int] = frozenset()) -> None:
        self._root = schema
        self._spelling = spelling

    def fault(self, value: Any) -> str:
        """Return the place and the keyword that a value breaks first; '' if it follows the schema.  Raises Unjudged."""
        try:
            return _Judgement(self._root, self._spelling).fault(_Place(value, self._root, ""))
        except RecursionError:
            raise Unjudged(_TOO_DEEP) from None
        except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            reason = str(error)[:_CHARACTERS]
            raise Unjudged(f"a keyword of its schema has a value that makes no sense: {reason}; correct it") from None


class _Judgement:
    """The judgement of one value.  Its work is counted before it is done.  root: what references lead into."""

    def __init__(self, root: Any, spelling: Set[int]) -> None:
        self._root = root
        self._spelling = spelling
        self._work = 0
        self._depth = 0
        self._listed: dict[int, set[bytes]] = {}  # values by the id of their list

    def fault(self, place: _Place) -> str:
        """Return what ``Judge.fault`` does, of a part of the value."""
        self._count(1 + len(place.path) // _CHARACTERS)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unjudged(_TOO_DEEP)
        found = next(self._faults(place), "")
        self._depth -= 1
        return found

    def _faults(self, place: _Place) -> Iterator[str]:
        value, schema, path = place
        where = path.removeprefix(".") or "the value"
        if schema is False:
            yield f"{where}: nothing is allowed here"
        if not isinstance(schema, dict):
            return
        for keyword, wanted in schema.items():
            self._count(1 if keyword in _UNREAD else 1 + _size(wanted))
            if not self._holds(keyword, wanted, value, schema):
                yield f"{where}: {keyword}"
            for inner in self._inner(keyword, wanted, place):
                if found := self.fault(inner):
                    yield found

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise Unjudged(f"it takes more than {_MAX_WORK:,} comparisons to check; simplify the schema")

    def _follows(self, value: Any, schema: Any) -> bool:
        return not self.fault(_Place(value, schema, ""))

    def _canonical(self, value: Any) -> bytes:
        """Return what equal values have in common: 1.0 is 1, and the order of properties means nothing."""
        return msgspec.json.encode(self._plain(value), order="deterministic")

    def _plain(self, value: Any) -> Any:
        self._count(1 if isinstance(value, list | dict) else 1 + _size(value))
        match value:
            case float() if value.is_integer():
                return int(value)
            case list():
                return [self._plain(one) for one in value]
            case dict():
                self._count(sum(map(_size, value)))
                return {name: self._plain(one) for name, one in value.items()}
        return value

    def _is_listed(self, value: Any, listed: list[Any]) -> bool:
        if id(listed) not in self._listed:
            self._listed[id(listed)] = {self._canonical(one) for one in listed}
        return self._canonical(value) in self._listed[id(listed)]

    def _holds(self, keyword: str, wanted: Any, value: Any, schema: dict[str, Any]) -> bool:
        match keyword:
            case "type":
                return any(_is(value, kind) for kind in (wanted if isinstance(wanted, list) else [wanted]))
            case "enum":
                return self._is_listed(value, wanted)
            case "const":
                return self._canonical(wanted) == self._canonical(value)
            case "anyOf":
                return any(self._follows(value, one) for one in wanted)
            case "oneOf":
                count = sum(self._follows(value, one) for one in wanted)
                return count == 1 or (count > 1 and any(id(one) in self._spelling for one in wanted))
            case "not":
                return not self._follows(value, wanted)
            case "required" if isinstance(value, dict):
                return all(name in value for name in wanted)
            case "dependentRequired" | "dependencies" if isinstance(value, dict):
                lists = [names for name, names in wanted.items() if name in value and isinstance(names, list)]
                self._count(sum(map(len, lists)))
                return all(one in value for names in lists for one in names)
            case "multipleOf" if _is(value, "number"):
                self._count(_size(value))
                return Fraction(str(value)) % Fraction(str(wanted)) == 0  # neither is more than 1e4300
            case "contains" if isinstance(value, list):
                count = sum(self._follows(one, wanted) for one in value)
                return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf))
            case "uniqueItems" if wanted is True and isinstance(value, list):
                return len({self._canonical(one) for one in value}) == len(value)
        return _keeps_bounds(keyword, wanted, value)

    def _inner(self, keyword: str, wanted: Any, place: _Place) -> Iterator[_Place]:
        """Yield the values that a keyword describes by schemas of their own, all of which must be followed."""
        value, schema, path = place
        match keyword:
            case "$ref":
                self._count(wanted.count("/"))
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
                self._count(len(value))
                known = schema.get("properties", {})
                yield from (_Place(one, wanted, f"{path}.{name}") for name, one in value.items() if name not in known)
            case "prefixItems" | "items" | "additionalItems" if isinstance(value, list):
                first, each = _members(keyword, wanted, schema)
                last = min(len(value), len(each)) if isinstance(each, list) else len(value)
                for index in range(first, last):
                    yield _Place(value[index], each[index] if isinstance(each, list) else each, f"{path}[{index}]")


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


def _size(value: Any) -> int:
    """Return the comparisons in the time of which a value is read, without the values in it."""
    match value:
        case str():
            return len(value) // _CHARACTERS
        case int():
            return value.bit_length() // _CHARACTERS
        case list() | dict():
            return len(value)
    return 0


def resolved(root: Any, reference: Any) -> Any:
    """Return the part of a schema that a reference names.  Raises LookupError if it names none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise LookupError(reference)
    part = root
    for step in reference[2:].split("/") if reference != "#" else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        match part:
            case dict():
                part = part[name]
            case list() if name.isdecimal() and len(name) <= _MOST_INDEX_DIGITS:
                part = part[int(name)]
            case _:
                raise LookupError(reference)
    return part


def divided(schema: Any) -> tuple[Any, Judge | None]:
    """Return what a grammar can express of a simplified schema, and the judge of the rest, if there is one.

    A schema that cannot be judged is returned whole."""
    leaving, spelling = _leading_to(JUDGED, schema), _leading_to(_SPELT, schema)
    if id(schema) not in leaving or not _can_be_judged(schema, leaving, spelling):
        return schema, None
    return _without_judged(schema), Judge(schema, spelling)


def _leading_to(keywords: Set[str], root: Any) -> Set[int]:
    """Return the ids of the schemas that lead to one with such a keyword, by references too.  Each is read once."""
    outer: dict[int, list[int]] = {}  # the schemas that lead to each
    found = []
    todo = [root] if isinstance(root, dict) else []
    while todo:
        schema = todo.pop()
        if not keywords.isdisjoint(schema):
            found.append(id(schema))
        inner = [part for _, part in parts(schema)]
        with suppress(LookupError):
            inner += [resolved(root, schema["$ref"])]
        for part in inner:
            if isinstance(part, dict):
                todo += [part] if id(part) not in outer and part is not root else []
                outer.setdefault(id(part), []).append(id(schema))
    leading: set[int] = set()
    while found:
        if (one := found.pop()) not in leading:
            leading.add(one)
            found += outer.get(one, ())
    return leading


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


def _can_be_judged(root: Any, leaving: Set[int], spelling: Set[int]) -> bool:
    """Return whether no judgement depends on text, and each reference names a part of the schema.

    leaving, spelling: ids of the schemas that lead to a judged keyword, or to text."""

    def can(schema: dict[str, Any], *, inside: bool) -> bool:
        if inside and id(schema) in spelling:
            return False
        if "$ref" in schema:
            try:
                resolved(root, schema["$ref"])
            except LookupError:
                return False
        if any(keyword in schema and not isinstance(schema[keyword], kind) for keyword, kind in _KINDS.items()):
            return False
        if any(is_unclear(schema.get(keyword)) for keyword in _UNIONS):
            return False
        return all(
            can(part, inside=inside or path[1:].split(".")[0].split("[")[0] in JUDGED) for path, part in parts(schema)
        )

    def is_unclear(alternatives: Any) -> bool:
        """Return whether a value may break a judged keyword of one alternative, and seem to follow another by text."""
        if not isinstance(alternatives, list):
            return False
        judged = {index for index, one in enumerate(alternatives) if id(one) in leaving}
        spelt = {index for index, one in enumerate(alternatives) if id(one) in spelling}
        return bool(judged and spelt) and len(judged | spelt) > 1

    return can(root, inside=False)
