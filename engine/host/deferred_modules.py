"""Modules of torch that only its compilers and tensors without memory need, put off until something of those comes.

Owns: which modules wait, and what ends the wait.  Does not know: torch, the engine.
They are a quarter of the processor time of ``import torch``: functions in Python that compute shapes of results.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

DEFERRED = ("torch._meta_registrations", "torch.distributed._meta_registrations")
# They compile what they trace, or run models without memory.
NEEDED_BY = ("torch._dynamo", "torch._inductor", "transformers")


class _Nothing(Loader):
    """A loader of an empty module."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: Python makes the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class DeferredModules(MetaPathFinder):
    """A finder that gives empty modules in the place of DEFERRED, until one of NEEDED_BY is imported."""

    def __init__(self) -> None:
        self._is_waiting = True

    def begin(self) -> None:
        """Put off the modules, if torch is not imported yet.  It is for processes that run callboard alone."""
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return an empty module's spec for a module that waits; None for others, which are found as usual."""
        if self._is_waiting and fullname in DEFERRED:
            return ModuleSpec(fullname, _Nothing())
        if self._is_waiting and fullname in NEEDED_BY:
            self.end()
        return None

    def end(self) -> None:
        """Import what was put off."""
        self._is_waiting = False
        sys.meta_path.remove(self)
        empty = [name for name in DEFERRED if name in sys.modules]
        for name in empty:
            del sys.modules[name]
        for name in empty:
            importlib.import_module(name)
