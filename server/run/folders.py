"""The folders of server/extensions, by their names, and their modules of one name.

Owns: which folders there are, and their order: each behind those that its package names in NEEDS.
A folder is left out where one that it needs is not there.  Does not know: what a module does.
"""

import pkgutil
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

PACKAGE = "server.extensions"
FOLDER = Path(__file__).parents[1] / "extensions"


@cache
def folders() -> tuple[str, ...]:
    """Return the names of the folders."""
    names = [one.name for one in pkgutil.iter_modules([str(FOLDER)]) if one.ispkg]
    needs: dict[str, Iterable[str]] = {name: getattr(import_module(f"{PACKAGE}.{name}"), "NEEDS", ()) for name in names}
    found: list[str] = []
    for name in TopologicalSorter(needs).static_order():
        if name in needs and all(one in found for one in needs[name]):
            found.append(name)
    return tuple(found)


def modules_named(name: str) -> list[ModuleType]:
    """Return the modules of that name, of the folders that have one."""
    named = [f"{PACKAGE}.{folder}.{name}" for folder in folders()]
    return [import_module(one) for one in named if find_spec(one) is not None]
