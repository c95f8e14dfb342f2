"""Settings that folders bring: each lies beside the code that reads it, and is found by a search.

Owns: the search, and how a section gets its further keys.  Does not know: any setting.
A folder's ``settings.py`` has subclasses of ``Addition`` and ``Array``.  A folder is deleted with its settings.
"""

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from engine.settings.section import Addition, Array, Section

PLACES: Final = ("engine", "engine.features", "engine.plugins", "engine.workers", "server.extensions")
S = TypeVar("S", bound=Section)


@cache
def additions() -> tuple[type[Addition], ...]:
    """Return the settings that folders bring, in the order of the folders' names."""
    return tuple(one for one in _brought() if issubclass(one, Addition))


@cache
def arrays() -> tuple[type[Array], ...]:
    """Return the arrays of tables that folders read."""
    return tuple(one for one in _brought() if issubclass(one, Array))


def _brought() -> list[type[Section]]:
    found: list[type[Section]] = []
    for place in PLACES:
        if (spec := find_spec(place)) is None or spec.submodule_search_locations is None:
            continue
        paths = list(spec.submodule_search_locations)
        for one in sorted(pkgutil.iter_modules(paths), key=lambda one: one.name):
            if one.ispkg and any(Path(path, one.name, "settings.py").is_file() for path in paths):
                module = import_module(f"{place}.{one.name}.settings")
                found += [kind for kind in vars(module).values() if _is_brought(kind)]
    return found


def _is_brought(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, (Addition, Array)) and kind not in (Addition, Array)


def extended(table: str) -> Callable[[type[S]], type[S]]:
    """Return the decorator of a section: it gives it the keys that folders add to ``table``."""

    def extend(section: type[S]) -> type[S]:
        fields = [field for one in additions() if one.table == table for field in msgspec.structs.fields(one)]
        return with_fields(section, [(one.name, one.type, _default(one)) for one in fields])

    return extend


def with_sections(config: type[S]) -> type[S]:
    """Return a configuration with the sections that folders bring, besides its own."""
    brought: dict[str, type[Addition]] = {
        one.table: one for one in additions() if one.table not in config.__struct_fields__
    }
    return with_fields(config, [(name, section, section()) for name, section in brought.items()])


def with_arrays(config: type[S]) -> type[S]:
    """Return a configuration with the arrays of tables that its file may have."""
    return with_fields(config, [(one.table, tuple[one, ...], ()) for one in arrays()])  # type: ignore[valid-type]


def with_fields(section: type[S], fields: list[tuple[str, object, object]]) -> type[S]:
    """Return a section with more keys.  fields: name, type and default of each.  Raises TypeError for a name twice."""
    twice = sorted({name for name, _, _ in fields if [one[0] for one in fields].count(name) > 1})
    if both := sorted({name for name, _, _ in fields} & {*section.__struct_fields__}) or twice:
        raise TypeError(f"{section.__name__}: two folders bring {', '.join(both)}")
    return msgspec.defstruct(  # type: ignore[return-value]
        section.__name__,
        fields,
        bases=(section,),
        namespace={"__doc__": section.__doc__},
        module=section.__module__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return field.default
