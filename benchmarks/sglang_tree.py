"""SGLang's two prefix trees, in Python and in Rust, of an unpacked wheel.

A wheel is unpacked with ``python -m zipfile -e sglang-*.whl FOLDER``.  Its trees are imported without the packages that
the rest of SGLang needs: modules outside of its folder of caches have stand-ins, of which the trees use nothing.

Owns: the imports, the calls.  Does not know: what is measured.
"""

import sys
from array import array
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

CACHES = "sglang.srt.mem_cache"
NOT_OF_THE_TREES = f"{CACHES}.memory_pool"
FULL = 0  # the kind of attention
Tokens = np.ndarray


class _StandIn:
    """A base class, decorator, constant or function of a module that is not imported."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take anything."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()


class _StandIns(MetaPathFinder, Loader):
    """A finder of all modules of SGLang but its folder of caches."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        ours = fullname.startswith("sglang.")
        inside = f"{fullname}.".startswith(f"{CACHES}.") and fullname != NOT_OF_THE_TREES
        return ModuleSpec(fullname, self, is_package=True) if ours and not inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def load(folder: Path) -> dict[str, "PythonTree | RustTree"]:
    """Return the trees, new ones, with pages of one token.  folder: of the unpacked wheel."""
    sys.meta_path.insert(0, _StandIns())
    for name in ("sglang", "sglang.srt", CACHES):
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    common = import_module("sglang.srt.utils.common")
    common.ceil_align = lambda size, step: -(-size // step) * step  # type: ignore[attr-defined]
    return {"SGLang, Rust": RustTree(), "SGLang, Python": PythonTree()}


class PythonTree:
    """``RadixCache``."""

    def __init__(self) -> None:
        module, self._base = import_module(f"{CACHES}.radix_cache"), import_module(f"{CACHES}.base_prefix_cache")
        self._key, self._new = module.RadixKey, lambda: module.RadixCache.create_simulated(mock_allocator=_StandIn())
        self.clear()

    def clear(self) -> None:
        """Begin with an empty tree."""
        self._tree = self._new()

    def key(self, tokens: Tokens) -> Any:
        """Return the tokens as the tree takes them."""
        return self._key(array("q", tokens.astype(np.int64).tobytes()))

    def match(self, key: Any) -> int:
        """Return the number of tokens that are cached."""
        return int(self._tree.match_prefix(self._base.MatchPrefixParams(key=key)).device_prefix_len)

    def insert(self, key: Any, slots: torch.Tensor) -> None:
        """Add a prompt.  slots: int64, of each token."""
        self._tree.insert(self._base.InsertParams(key=key, value=slots))

    def evict(self) -> None:
        """Evict one leaf of one token."""
        self._tree.evict(self._base.EvictParams(num_tokens=1))

    @property
    def num_cached(self) -> int:
        """The number of tokens in the tree."""
        return int(self._tree.total_size())


class RustTree:
    """The tree that ``RustUnifiedTreeCoreBinding`` binds, called without SGLang's adapter around it."""

    def __init__(self) -> None:
        self._module = import_module(f"{CACHES}.rust_tree_core.mem_cache")
        self.clear()

    def clear(self) -> None:
        """Begin with an empty tree."""
        settings = self._module.TreeCoreInitParamsBinding(page_size=1, device="cpu", eviction_policy="lru")
        self._tree = self._module.RustUnifiedTreeCoreBinding(settings, [FULL])

    def key(self, tokens: Tokens) -> Any:
        """Return the tokens as the tree takes them."""
        return array("q", tokens.astype(np.int64).tobytes())

    def match(self, key: Any) -> int:
        """Return the number of tokens that are cached."""
        return int(self._tree.match_prefix(self._module.MatchParamsBinding(key=key)).device_prefix_len)

    def insert(self, key: Any, slots: torch.Tensor) -> None:
        """Add a prompt.  slots: int64, of each token."""
        self._tree.insert(self._module.InsertParamsBinding(key=key, value=slots))

    def evict(self) -> None:
        """Evict one leaf of one token, as ``UnifiedRadixCache.evict`` does."""
        self._tree.evict_device_start(FULL, 1)
        found = self._tree.evict_device_next_node(FULL, {FULL: 0})
        if found.node_id is not None:
            self._tree.evict_device_leaf(found.node_id)
        self._tree.evict_device_end(FULL)

    @property
    def num_cached(self) -> int:
        """The number of tokens in the tree."""
        return int(self._tree.evictable_size())


Trees = dict[str, PythonTree | RustTree]


def slots_of(prompts: Sequence[Tokens]) -> list[torch.Tensor]:
    """Return a slot for each token of each prompt."""
    ends = np.cumsum([len(one) for one in prompts])
    return [torch.arange(end - len(one), end) for one, end in zip(prompts, ends.tolist(), strict=True)]
