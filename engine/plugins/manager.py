"""The plugin manager: loads exactly the plugins that were chosen, and refuses what is ambiguous.

Owns: the table of built-in names, the choice for "auto", and the loaded modules.
Does not know: what a plugin builds.  Importing this file imports no plugin.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from types import ModuleType

import pluggy

from engine.errors import PluginError
from engine.plugins import hookspecs

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "callboard"
DISTRIBUTION = "callboard"
OBSERVER = "observer"  # the kind of which any number may be chosen

BUILTIN: Mapping[str, str] = {
    "attention.torch": "engine.plugins.attention.torch",
    "comm.local": "engine.plugins.comm.local",
    "eviction.fifo": "engine.plugins.eviction.fifo",
    "eviction.lfu": "engine.plugins.eviction.lfu",
    "eviction.lru": "engine.plugins.eviction.lru",
    "eviction.priority": "engine.plugins.eviction.priority",
    "eviction.slru": "engine.plugins.eviction.slru",
    "observer.log": "engine.plugins.observer.log",
    "policy.fcfs": "engine.plugins.policy.fcfs",
    "policy.lpm": "engine.plugins.policy.lpm",
    "policy.priority": "engine.plugins.policy.priority",
}
AUTO: Mapping[str, tuple[str, str]] = {
    "attention": ("torch", "runs on every device"),
    "comm": ("local", "there is one rank"),
    "eviction": ("lru", "needs no tuning"),
    "policy": ("priority", "first come, first served where nobody sends a priority"),
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin that could be chosen.  name: '<kind>.<name>'."""

    name: str
    module: str
    distribution: str
    version: str


def available_plugins() -> list[PluginInfo]:
    """Every plugin that is installed, built-in or not, without importing any.  Sorted by name.

    Raises PluginError if two distributions claim one name.
    """
    own = version(DISTRIBUTION)
    found = {name: PluginInfo(name, module, DISTRIBUTION, own) for name, module in BUILTIN.items()}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        info = _describe(point)
        if info.name in found:
            raise PluginError(
                f"plugin {info.name!r} is claimed by {found[info.name].distribution} and {info.distribution}; "
                "uninstall one of them"
            )
        found[info.name] = info
    return sorted(found.values(), key=lambda info: info.name)


def _describe(point: EntryPoint) -> PluginInfo:
    distribution = point.dist
    return PluginInfo(
        name=point.name,
        module=point.module,
        distribution=distribution.name if distribution else "unknown",
        version=distribution.version if distribution else "unknown",
    )


def choose(wanted: Mapping[str, str]) -> dict[str, str]:
    """Kind -> full plugin name, with 'auto' decided."""
    return {kind: f"{kind}.{AUTO[kind][0] if name == 'auto' else name}" for kind, name in wanted.items()}


def observer_names(wanted: Sequence[str]) -> list[str]:
    """Full names of observers.  Raises PluginError if one is named twice."""
    for name in wanted:
        if wanted.count(name) > 1:
            raise PluginError(f"plugins.observers names {name!r} more than once")
    return [f"{OBSERVER}.{name}" for name in wanted]


class Plugins:
    """The chosen plugins, loaded.  ``hook`` is pluggy's caller for each hook of ``hookspecs``.

    names: kind -> full name, of the kinds of which one is chosen.  observers: full names, in the order they are told.
    """

    def __init__(self, chosen: Mapping[str, str], observers: Sequence[str] = ()) -> None:
        """chosen: kind -> plugin name or 'auto'.  observers: names of that kind.

        Raises PluginError; the message lists the alternatives."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.names = choose(chosen)
        self.observers = observer_names(observers)
        known = {info.name: info for info in available_plugins()}
        for kind, full_name in self.names.items():
            if chosen[kind] == "auto":
                log.info("plugin: %s (auto: %s)", full_name, AUTO[kind][1])
        for full_name in (*self.names.values(), *self.observers):
            info = known.get(full_name)
            if info is None:
                kind, _, name = full_name.partition(".")
                choices = [other.removeprefix(f"{kind}.") for other in known if other.startswith(f"{kind}.")]
                raise PluginError(f"no {kind} plugin named {name!r}; available: {', '.join(choices)}")
            self.register(_import(info), info.name)

    @property
    def hook(self) -> pluggy.HookRelay:
        """Call a hook: ``plugins.hook.callboard_comm(context=...)``."""
        return self._manager.hook

    def implementations(self, hook_name: str) -> list[pluggy.HookImpl]:
        """Each loaded plugin's answer to a hook that several may answer, in the order in which they were loaded."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook_name)
        return [impl for impl in caller.get_hookimpls() if not (impl.wrapper or impl.hookwrapper)]

    def register(self, plugin: object, name: str) -> None:
        """Load a module, or an object that has hooks as its methods.

        Raises PluginError for a hook that is misspelt or async, and where two would answer one question."""
        if (other := self._manager.get_name(plugin)) is not None:
            raise PluginError(f"plugins {other} and {name} are one and the same; give each a module of its own")
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin {name}: {' '.join(str(error).split())}") from None
        for caller in self._callers():
            impls = self.implementations(caller.name)
            for impl in impls:
                if inspect.iscoroutinefunction(impl.function):
                    raise PluginError(f"plugin {name}: {caller.name} is async; hooks are plain functions")
            # Hooks with one answer; any number of plugins may observe.
            if len(impls) > 1 and caller.spec is not None and caller.spec.opts["firstresult"]:
                answers = " and ".join(impl.plugin_name for impl in impls)
                raise PluginError(f"{caller.name} is implemented by {answers}; choose one")

    def _callers(self) -> Iterator[pluggy.HookCaller]:
        for hook_name in vars(self._manager.hook):
            caller = getattr(self._manager.hook, hook_name)
            if isinstance(caller, pluggy.HookCaller):
                yield caller


def _import(info: PluginInfo) -> ModuleType:
    try:
        return import_module(info.module)
    except ImportError as error:
        origin = f"{info.distribution} {info.version}"
        raise PluginError(f"plugin {info.name} ({origin}) cannot be imported: {error}") from None
