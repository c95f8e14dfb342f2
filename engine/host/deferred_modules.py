"""Modules of another package that are imported when they are first used, although their package imports them at once.

Owns: the placeholders, and what puts the modules in their place.  Does not know: which modules are worth it.
A package's own ``import`` of such a module gets a placeholder.  The module itself is imported by the first look at one
of the placeholder's names, by the import of a module below it, and by the import of what relies on its effects.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class DeferredModules(MetaPathFinder, Loader):
    """A finder of modules that gives placeholders.

    names: the modules.  needing: packages whose import imports all of them first."""

    def __init__(self, names: Sequence[str], needing: Sequence[str]) -> None:
        self._names = names
        self._needing = tuple(f"{name}." for name in (*needing, *names))

    def install(self) -> None:
        """Give placeholders from now on, for modules that are not there yet."""
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the place of a placeholder; None for what others find."""
        if fullname in self._names:
            return ModuleSpec(fullname, self, is_package=True)
        if f"{fullname}.".startswith(self._needing):
            self.complete()
            if (module := sys.modules.get(fullname)) is None:
                return find_spec(fullname)
            # Its package has imported it meanwhile.  The import system would run it again by the place that it names.
            place, module.__spec__ = module.__spec__, None
            return ModuleSpec(fullname, _Present(place))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a placeholder."""
        return _Placeholder(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder is empty."""

    def complete(self) -> None:
        """Import what was deferred."""
        with suppress(ValueError):
            sys.meta_path.remove(self)
        for name in self._names:
            if isinstance(sys.modules.get(name), _Placeholder):
                del sys.modules[name]
                import_module(name)


class _Present(Loader):
    """A loader of a module that is there.  place: the module's own."""

    def __init__(self, place: ModuleSpec | None) -> None:
        self._place = place

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its place back; it has run."""
        module.__spec__ = self._place


class _Placeholder(ModuleType):
    """A module whose names are looked up in the one in whose place it stands."""

    def __init__(self, name: str, deferred: DeferredModules) -> None:
        super().__init__(name)
        self.__deferred__ = deferred

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and ``inspect`` look at every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__deferred__.complete()
        return getattr(import_module(self.__name__), name)
