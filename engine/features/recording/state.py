"""A planner's objects as plain data, and back: the beginning of a recording that does not begin with the engine.

Owns: how objects that refer to each other are written.  Does not know: what they mean.
Reading calls no code that a file names: only classes and functions of the allowed modules come back, objects
are made empty and get their fields.  Nothing recurses along references, since a radix tree may be deep.

An object is an entry: its kind, and values.  A plain value is written as it is, another one as a list with the number
of its entry.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache, partial
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np

from engine.kv.radix import RadixTree
from engine.scheduling.trees import joined
from engine.types.errors import CallboardError

PLAIN = (type(None), bool, int, float, str, bytes)
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "counter": Counter, "ordered": OrderedDict}
NUMBERS = "biuf"  # kinds of arrays
# Modules of a planner's rings and records, in addition to the modules of its plugins.
MODULES = ("engine.scheduling", "engine.kv", "engine.features", "engine.messages", "engine.types",
           "engine.plugins.guards", "engine.actors.rank_results", "engine.text.pictures")  # fmt: skip
BUILTINS = ("time.perf_counter",)  # a guard's clock
JOINT = "+"  # between the names of a tree's kinds

Entry = tuple[Any, ...]


class StateError(CallboardError):
    """An error of an object that has no form here, or of an entry that may not be read."""


def state_entries(root: object) -> Iterator[Entry]:
    """Yield the entry of an object, the first one, and of everything that it refers to.

    Nothing may change meanwhile.  Raises StateError for an object of a kind that has no form."""
    numbers: dict[int, int] = {id(root): 0}
    waiting: list[object] = [root]

    def value(one: object) -> object:
        if type(one) in PLAIN:
            return one
        if id(one) not in numbers:
            numbers[id(one)] = len(waiting)
            waiting.append(one)  # kept to the end, so that no id is used twice
        return [numbers[id(one)]]

    for one in waiting:  # grows meanwhile
        yield _entry(one, value)


def _entry(one: object, value: Callable[[object], object]) -> Entry:
    kind: Any = type(one)
    if kind is list or kind is set:
        return (kind.__name__, *map(value, one))  # type: ignore[call-overload]
    if isinstance(one, dict):
        name = next((name for name, known in DICTS.items() if known is kind), None)
        if name is not None:
            return (name, *(value(part) for item in one.items() for part in item))
    if kind is deque:
        assert isinstance(one, deque)
        return ("deque", one.maxlen, *map(value, one))
    if kind is bytearray:
        assert isinstance(one, bytearray)
        return ("bytearray", bytes(one))
    if isinstance(one, np.ndarray) and one.dtype.kind in NUMBERS:
        return ("array", one.dtype.str, one.shape, one.flags.writeable, _packed(one))
    if isinstance(one, np.generic) and one.dtype.kind in NUMBERS:
        return ("number", one.dtype.str, one.tobytes())
    if isinstance(one, Enum):
        return ("enum", _name(kind), one.value)
    if isinstance(one, tuple):
        return ("tuple", "" if kind is tuple else _name(kind), *map(value, one))
    if isinstance(one, msgspec.Struct):
        return ("struct", _name(kind), *(value(getattr(one, name)) for name in kind.__struct_fields__))
    if isinstance(one, partial):
        return ("partial", value(one.func), value(one.args), value(one.keywords))
    if isinstance(one, MethodType):
        return ("method", value(one.__self__), one.__name__)
    if isinstance(one, FunctionType | type) or (isinstance(one, BuiltinFunctionType) and _name(one) in BUILTINS):
        return ("named", _name(one))
    names = _fields(kind)
    if kind.__module__ == "builtins" or not names:
        raise StateError(f"an object of type {kind.__module__}.{kind.__qualname__} has no form in a recording")
    there = [name for name in names if hasattr(one, name)] if "__dict__" not in names else list(vars(one))
    fields = ((name, getattr(one, name)) for name in there)
    return ("object", _name(kind), *(part for name, at in fields for part in (name, value(at))))


def _name(one: Any) -> str:
    if joins := vars(one).get("joins") if isinstance(one, type) else ():
        return JOINT.join(map(_name, joins))
    if "<" in one.__qualname__:
        raise StateError(f"{one.__module__}.{one.__qualname__} is known by no name, so it has no form in a recording")
    return (
        f"{one.__module__}:{one.__qualname__}"
        if not isinstance(one, BuiltinFunctionType)
        else (f"{one.__module__}.{one.__qualname__}")
    )


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the slots of a class; ``__dict__`` if it has none."""
    slots = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]
    has_dict = any("__dict__" in base.__dict__ for base in kind.__mro__)
    if has_dict and slots:
        raise StateError(f"{kind.__qualname__} has slots and a dictionary")
    return ("__dict__",) if has_dict else tuple(slots)


def _packed(array: np.ndarray) -> bytes | list[bytes]:
    """Return an array as bytes; a table as its rows without the zeros at their ends: most rows are short."""
    if array.ndim != 2:
        return array.tobytes()
    ends = [int(filled[-1]) + 1 if len(filled := np.flatnonzero(row)) else 0 for row in array]
    return [row[:end].tobytes() for row, end in zip(array, ends, strict=True)]


def _unpacked(dtype: np.dtype[Any], shape: tuple[int, ...], packed: bytes | list[bytes]) -> np.ndarray:
    if isinstance(packed, bytes):
        return np.frombuffer(packed, dtype=dtype).reshape(shape).copy()
    array = np.zeros(shape, dtype=dtype)
    for row, part in zip(array, packed, strict=True):
        values = np.frombuffer(part, dtype=dtype)
        row[: len(values)] = values
    return array


def state_of(entries: Sequence[Sequence[Any]], modules: Sequence[str]) -> Any:
    """Return the object of the first entry, with everything that it refers to.

    modules: modules whose classes and functions are allowed, in addition to ``MODULES``; a package allows all below it.
    Raises StateError."""
    try:
        return _Reader(entries, (*MODULES, *modules)).root()
    except (LookupError, TypeError, ValueError, AttributeError, ImportError, RecursionError) as error:
        raise StateError(f"the state is not what this version writes: {type(error).__name__}: {error}") from None


class _Reader:
    def __init__(self, entries: Sequence[Sequence[Any]], modules: tuple[str, ...]) -> None:
        self._entries = entries
        self._modules = modules
        self._made: list[Any] = [None] * len(entries)
        self._is_made = [False] * len(entries)

    def root(self) -> Any:
        fill: list[tuple[Any, Sequence[Any]]] = []
        for number, entry in enumerate(self._entries):
            if (empty := self._empty(entry)) is not None:
                self._made[number], self._is_made[number] = empty, True
                fill.append((empty, entry))
        for number in range(len(self._entries)):
            self._at(number)
        for empty, entry in fill:
            self._fill(empty, entry)
        return self._made[0]

    def _empty(self, entry: Sequence[Any]) -> Any:
        """Return an empty object to which others may refer before it has its fields; None for kinds made at once."""
        match entry[0]:
            case "list":
                return []
            case "set":
                return set()
            case "deque":
                return deque(maxlen=entry[1])
            case "object":
                kind = self._named(entry[1])
                if not isinstance(kind, type):
                    raise StateError(f"{entry[1]} is no class")
                return object.__new__(kind)
            case name if name in DICTS:
                return DICTS[name]()
        return None

    def _fill(self, empty: Any, entry: Sequence[Any]) -> None:
        kind, values = entry[0], entry[1:]
        if kind in ("list", "deque"):
            empty.extend(map(self._value, values if kind == "list" else values[1:]))
        elif kind == "set":
            empty.update(map(self._value, values))
        elif kind == "object":
            for name, value in zip(values[1::2], values[2::2], strict=True):
                object.__setattr__(empty, name, self._value(value))
        else:
            for key, value in zip(values[::2], values[1::2], strict=True):
                empty[self._value(key)] = self._value(value)

    def _value(self, value: Any) -> Any:
        return self._at(value[0]) if isinstance(value, list | tuple) else value

    def _at(self, number: int) -> Any:
        if not self._is_made[number]:
            self._made[number] = self._whole(self._entries[number])
            self._is_made[number] = True
        return self._made[number]

    def _whole(self, entry: Sequence[Any]) -> Any:
        kind, values = entry[0], entry[1:]
        match kind:
            case "bytearray":
                return bytearray(values[0])
            case "array":
                dtype = np.dtype(values[0])
                if dtype.kind not in NUMBERS:
                    raise StateError(f"arrays of {values[0]} are not read")
                array = _unpacked(dtype, tuple(values[1]), values[3])
                array.flags.writeable = values[2]
                return array
            case "number":
                return np.frombuffer(values[1], dtype=np.dtype(values[0]))[0]
            case "enum":
                return self._named(values[0])(values[1])
            case "tuple":
                parts = map(self._value, values[1:])
                return self._named(values[0])(*parts) if values[0] else tuple(parts)
            case "struct":
                return self._struct(self._named(values[0]), [self._value(value) for value in values[1:]])
            case "partial":
                function, arguments, keywords = map(self._value, values)
                return partial(function, *arguments, **keywords)
            case "method":
                owner = self._value(values[0])
                if not isinstance(getattr(type(owner), values[1], None), FunctionType):
                    raise StateError(f"{values[1]} is no method of {type(owner).__qualname__}")
                return getattr(owner, values[1])
            case "named":
                return self._named(values[0])
        raise StateError(f"an entry of kind {kind!r}")

    def _struct(self, kind: type[msgspec.Struct], values: list[Any]) -> msgspec.Struct:
        fields = dict(zip(kind.__struct_fields__, values, strict=True))
        made = kind(**fields)
        for name, value in fields.items():  # the constructor may have changed a value, or the object has since
            msgspec.structs.force_setattr(made, name, value)
        return made

    def _named(self, name: str) -> Any:
        if JOINT in name:
            kinds = tuple(map(self._named, name.split(JOINT)))
            if not all(isinstance(one, type) and issubclass(one, RadixTree) for one in kinds):
                raise StateError(f"{name} joins what is no kind of tree")
            return joined(kinds)
        if name in BUILTINS:
            module, _, qualified = name.rpartition(".")
        else:
            module, _, qualified = name.partition(":")
            if not any(module == one or module.startswith(f"{one}.") for one in self._modules):
                raise StateError(f"{name} belongs neither to the scheduler nor to its plugins, so it is not read")
        found: Any = import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
        if not isinstance(found, type | FunctionType | BuiltinFunctionType):
            raise StateError(f"{name} is neither a class nor a function")
        return found
