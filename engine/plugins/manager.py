"""The plugin manager: loads exactly the plugins that were chosen, and refuses what is ambiguous.

Owns: the table of built-in names, the choice for "auto", and the loaded modules.
Does not know: what a plugin builds.  Importing this file imports no plugin.
"""

import logging
from collections.abc import Mapping
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

BUILTIN: Mapping[str, str] = {
    "attention.torch": "engine.plugins.attention.torch",
    "comm.local": "engine.plugins.comm.local",
    "eviction.fifo": "engine.plugins.eviction.fifo",
    "eviction.lfu": "engine.plugins.eviction.lfu",
    "eviction.lru": "engine.plugins.eviction.lru",
    "eviction.priority": "engine.plugins.eviction.priority",
    "eviction.slru": "engine.plugins.eviction.slru",
}
AUTO: Mapping[str, tuple[str, str]] = {
    "attention": ("torch", "runs on every device"),
    "comm": ("local", "there is one rank"),
    "eviction": ("lru", "needs no tuning"),
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


class Plugins:
    """The chosen plugins, loaded.  ``hook`` is pluggy's caller for each hook of ``hookspecs``."""

    def __init__(self, chosen: Mapping[str, str]) -> None:
        """chosen: kind -> plugin name or 'auto'.  Raises PluginError; the message lists the alternatives."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.names: dict[str, str] = {}
        known = {info.name: info for info in available_plugins()}
        for kind, full_name in choose(chosen).items():
            if chosen[kind] == "auto":
                log.info("plugin: %s (auto: %s)", full_name, AUTO[kind][1])
            name = full_name.removeprefix(f"{kind}.")
            info = known.get(full_name)
            if info is None:
                choices = [other.removeprefix(f"{kind}.") for other in known if other.startswith(f"{kind}.")]
                raise PluginError(f"no {kind} plugin named {name!r}; available: {', '.join(choices)}")
            self._manager.register(_import(info), name=info.name)
            self.names[kind] = info.name
        self._check()

    @property
    def hook(self) -> pluggy.HookRelay:
        """Call a hook: ``plugins.hook.callboard_comm(context=...)``."""
        return self._manager.hook

    def _check(self) -> None:
        """Misspelt hooks and two answers to one question are errors at start."""
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin hook is unknown: {error}") from None
        for hook_name in vars(self._manager.hook):
            caller = getattr(self._manager.hook, hook_name, None)
            if not isinstance(caller, pluggy.HookCaller):
                continue
            answers = [impl.plugin_name for impl in caller.get_hookimpls() if not (impl.wrapper or impl.hookwrapper)]
            if len(answers) > 1:
                raise PluginError(f"{hook_name} is implemented by {' and '.join(answers)}; choose one")


def _import(info: PluginInfo) -> ModuleType:
    try:
        return import_module(info.module)
    except ImportError as error:
        origin = f"{info.distribution} {info.version}"
        raise PluginError(f"plugin {info.name} ({origin}) cannot be imported: {error}") from None
