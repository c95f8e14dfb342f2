"""The plugin manager: loads exactly the chosen plugins, and refuses ambiguous ones.

Owns: the table of installed plugins, the choice for "auto" if it needs no device, and the loaded modules.
Does not know: what a plugin builds, the attention backend for a device (``selection.py``).
Importing this file imports no plugin.
"""

import inspect
import logging
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import pluggy

from engine import __version__
from engine.host.device_defaults import gpu_bytes
from engine.host.timeouts import named_while_slow
from engine.plugins import hookspecs
from engine.plugins.declaration import CONSTANT, Declaration, check_api, convert_declaration, read_declaration
from engine.plugins.kinds import ATTENTION, GRAMMAR, KINDS, LINEAR, OBSERVER, Wanted
from engine.settings.attention_names import AttentionNames
from engine.types.errors import CallboardError, PluginError

log = logging.getLogger(__name__)

Built = TypeVar("Built")

ENTRY_POINT_GROUP = "callboard"
DISTRIBUTION = "callboard"
BUILTIN: Mapping[str, str] = {
    f"{kind.name}.{name}": f"engine.plugins.{kind.name}.{name}" for kind in KINDS.values() for name in kind.built_in
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin that could be chosen.  name: '<kind>.<name>'."""

    name: str
    module: str
    distribution: str
    version: str

    @property
    def kind(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]

    @property
    def short(self) -> str:
        """The part of the name after the dot, as in the configuration."""
        return self.name.partition(".")[2]

    @property
    def built_in(self) -> bool:
        """Whether the plugin comes with callboard."""
        return self.name in BUILTIN

    @property
    def label(self) -> str:
        """The name and the distribution, for errors."""
        return f"{self.name} ({self.distribution} {self.version})"


def available_plugins() -> list[PluginInfo]:
    """Return all installed plugins, built-in or not, sorted by name; none is imported.

    Raises PluginError if two distributions claim one name.
    """
    found = {name: PluginInfo(name, module, DISTRIBUTION, __version__) for name, module in BUILTIN.items()}
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


def declared(info: PluginInfo) -> Declaration | None:
    """Return a plugin's declaration, without importing the plugin; None without a declaration or source.

    Raises PluginError if the declaration is invalid."""
    try:
        return read_declaration(info.module)
    except PluginError as error:
        raise PluginError(f"plugin {info.label}: {error}") from None


def checked(info: PluginInfo, declaration: Declaration | None) -> Declaration:
    """Return the declaration if this callboard supports its API version.  Raises PluginError."""
    return check_api(declaration, plugin=info.label, module=info.module, distribution=info.distribution)


def hindrance(info: PluginInfo) -> str:
    """Return a short reason why a plugin cannot run on this machine, as far as known without a model; else ''."""
    try:
        declaration = checked(info, declared(info))
    except PluginError:
        return "broken: callboard plugins says how"
    if missing := declaration.missing_packages():
        return f"needs {' and '.join(missing)}"
    needs_gpu = declaration.devices and "cpu" not in declaration.devices
    return "needs a GPU" if needs_gpu and not gpu_bytes() else ""


def decide(kind: str, name: str) -> str:
    """Return the full name of a choice; 'auto' becomes the default of its kind."""
    return f"{kind}.{KINDS[kind].default if name == 'auto' and KINDS[kind].default else name}"


def several_names(kind: str, wanted: Sequence[str]) -> list[str]:
    """Return the full names of plugins of a kind with ``several``.  Raises PluginError if a name is repeated."""
    for name in wanted:
        if wanted.count(name) > 1:
            raise PluginError(f"plugins.{KINDS[kind].setting} names {name!r} more than once")
    return [f"{kind}.{name}" for name in wanted]


class Plugins:
    """The chosen plugins, loaded.  ``hook`` is pluggy's caller for each hook of ``hookspecs``.

    names: kind -> full name; it has attention only if one backend was named for both phases, linear only if a kernel
    was named.
    attention: the configured names for its two phases; a backend for 'auto' is loaded later, when the device is known.
    several: kind -> full names, in the order of the configuration.  options: by full name.
    absent: why the default grammar plugin cannot be loaded; '' if it can.
    known: all installed plugins, by full name.  declarations: those of the loaded plugins.
    choosing: a lock; hold it while reading declarations.
    """

    def __init__(self, chosen: Mapping[str, Wanted], options: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Load plugins.  chosen: kind -> plugin name or 'auto', or the names of a kind with ``several``.

        Raises PluginError; the message lists the alternatives."""
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        # Ranks of one process choose their attention backends at the same time, and reading declarations is not safe
        # then: CPython 3.11's ast module counts its depth in one place for all threads.
        self.choosing = threading.RLock()
        self.known = {info.name: info for info in available_plugins()}
        self.options = options or {}
        for name in self.options:
            if name not in self.known:
                raise PluginError(
                    f"[plugins.options.{name!r}]: no plugin has this name; available: {', '.join(self.known)}"
                )
        self.names: dict[str, str] = {}
        self.declarations: dict[str, Declaration] = {}
        self.absent = ""
        self.attention = AttentionNames()
        self.several: dict[str, list[str]] = {}
        for kind, wanted in chosen.items():
            if isinstance(wanted, AttentionNames):
                self._choose_attention(wanted)
            elif isinstance(wanted, list):
                self._choose_several(kind, wanted)
            elif kind == ATTENTION:
                self._choose_attention(AttentionNames(prefill=wanted, decode=wanted))
            elif kind == LINEAR:
                self._choose_linear(wanted)
            else:
                self._choose(kind, wanted)

    def _choose(self, kind: str, wanted: str) -> None:
        self.names[kind] = full_name = decide(kind, wanted)
        reason = "chosen by name" if full_name == f"{kind}.{wanted}" else f"auto: {KINDS[kind].because}"
        log.info("plugin: %s (%s)", full_name, reason)
        try:
            self.load(full_name)
        except PluginError as error:
            # Only some requests need a grammar, so the default plugin may be missing; such a request then fails.
            if (kind, wanted) != (GRAMMAR, "auto"):
                raise
            self.absent = f"{error} (pip install {KINDS[kind].default}, or name another in plugins.{kind})"

    def _choose_several(self, kind: str, wanted: list[str]) -> None:
        self.several[kind] = several_names(kind, wanted)
        for full_name in self.several[kind]:
            log.info("plugin: %s (chosen by name)", full_name)
            self.load(full_name)

    def _choose_attention(self, wanted: AttentionNames) -> None:
        """Load the backends that are named, so that a mistake is found before weights are loaded."""
        self.attention = wanted
        for name in dict.fromkeys((wanted.prefill, wanted.decode)):
            if name != "auto":
                self.load(f"{ATTENTION}.{name}")
        if wanted.prefill == wanted.decode != "auto":
            self.names[ATTENTION] = f"{ATTENTION}.{wanted.prefill}"

    def _choose_linear(self, wanted: str) -> None:
        """Load the kernel if it is named, so that a mistake is found before weights are loaded."""
        if wanted != "auto":
            self.names[LINEAR] = f"{LINEAR}.{wanted}"
            self.load(self.names[LINEAR])

    @property
    def hook(self) -> pluggy.HookRelay:
        """The callers of all hooks, as in ``plugins.hook.callboard_comm(context=...)``."""
        return self._manager.hook

    def asking(self, full_name: str) -> pluggy.HookCaller:
        """Return a caller of the kind's hook that calls this plugin's implementation only, and all wrappers."""
        hook_name = KINDS[self.known[full_name].kind].hook
        others = [
            self._manager.get_plugin(impl.plugin_name)
            for impl in self.implementations(hook_name)
            if impl.plugin_name != full_name
        ]
        return self._manager.subset_hook_caller(hook_name, others)

    def build(self, full_name: str, context: Any, *protocols: type[Built]) -> Built:
        """Call the hook of a plugin's kind and return the built object.  context: of that kind, without options.

        protocols: the built object must satisfy one of them.

        Raises PluginError, which names the plugin, for any other result or exception."""
        info = self.known[full_name]
        hook_name = KINDS[info.kind].hook
        try:
            with named_while_slow(f"plugin {info.label}: {hook_name}"):
                context = replace(context, options=self.options.get(full_name, {}))
                built: object = self.asking(full_name)(context=context)
        except CallboardError:
            raise
        except (Exception, SystemExit) as error:
            raise self.raised(full_name, hook_name, error) from error
        if not isinstance(built, protocols):
            lacking = "" if built is None else f", which is no {' or '.join(kind.__name__ for kind in protocols)}"
            raise PluginError(
                f"plugin {info.label}: {hook_name} must be implemented, and built {built!r:.100}{lacking}"
            )
        return built

    def raised(self, full_name: str, hook_name: str, error: BaseException) -> PluginError:
        """Return the error for a hook that raised; it names the plugin and the line in it."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        label = self.known[full_name].label if full_name in self.known else full_name
        return PluginError(f"plugin {label} raised {error!r} in {hook_name} ({where.filename}:{where.lineno})")

    def implementations(self, hook_name: str) -> list[pluggy.HookImpl]:
        """Return the hook's implementations without wrappers, in the order in which their plugins were loaded."""
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook_name)
        return [impl for impl in caller.get_hookimpls() if not (impl.wrapper or impl.hookwrapper)]

    def find(self, full_name: str) -> PluginInfo:
        """Return an installed plugin.  Raises PluginError, which lists the alternatives, if there is none."""
        info = self.known.get(full_name)
        if info is None:
            kind, _, name = full_name.partition(".")
            raise PluginError(f"no {kind} plugin named {name!r}; {self._choices(kind)}")
        return info

    def _choices(self, kind: str, besides: str = "") -> str:
        """Return the end of an error message: the others of a kind that can run here, and why the rest cannot."""
        with self.choosing:
            others = {
                info.short: hindrance(info)
                for info in self.known.values()
                if info.kind == kind and info.name != besides
            }
        here = ", ".join(name for name, reason in others.items() if not reason)
        absent = ", ".join(f"{name} ({reason})" for name, reason in others.items() if reason)
        return f"available: {here or 'none'}" + (f"; not here: {absent}" if absent else "")

    def load(self, full_name: str) -> PluginInfo:
        """Import and register a plugin, unless it is loaded already.  Raises PluginError."""
        with self.choosing:
            return self._load(full_name)

    def _load(self, full_name: str) -> PluginInfo:
        info = self.find(full_name)
        if self._manager.has_plugin(full_name):
            return info
        declaration = declared(info)
        if declaration is not None:
            checked(info, declaration)  # before the import: code for another API may do anything
            if missing := declaration.missing_packages():
                advice = f"install it, or choose another; {self._choices(info.kind, info.name)}"
                raise PluginError(
                    f"plugin {info.label} needs {' and '.join(missing)}, which is not installed; {advice}"
                )
        try:
            with named_while_slow(f"plugin {info.label}: its import"):
                module = import_module(info.module)
        except (Exception, SystemExit) as error:
            reason = error if isinstance(error, ImportError) else repr(error)
            raise PluginError(f"plugin {info.label} cannot be imported: {reason}") from error
        if declaration is None and (table := getattr(module, CONSTANT, None)) is not None:
            declaration = convert_declaration(info.module, table)
        self.declarations[full_name] = checked(info, declaration)
        self.register(module, info.name)
        return info

    def register(self, plugin: object, name: str) -> None:
        """Load a module, or an object that has hooks as its methods.

        Raises PluginError for a hook that is misspelt or async, and for two answers to a hook with one answer."""
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
            # Any number of plugins may observe, and attention may have one for each phase; other hooks have one answer.
            owner = next((kind.name for kind in KINDS.values() if kind.hook == caller.name), "")
            foreign = [impl for impl in impls if not impl.plugin_name.startswith(f"{owner}.")]
            if len(impls) > 1 and foreign and owner not in ("", OBSERVER):
                answers = " and ".join(impl.plugin_name for impl in impls)
                raise PluginError(f"{caller.name} is implemented by {answers}; choose one")

    def _callers(self) -> Iterator[pluggy.HookCaller]:
        for hook_name in vars(self._manager.hook):
            caller = getattr(self._manager.hook, hook_name)
            if isinstance(caller, pluggy.HookCaller):
                yield caller
