"""The observers of one engine: each is called with what happened, and none can do harm.

Owns: which plugins are called with which events, and which have raised and are not called again.
Does not know: their reactions, the times of events.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pluggy import HookImpl

from engine.kv.events import KVEvent
from engine.plugins.hookspecs import ObserverContext
from engine.plugins.kinds import OBSERVER
from engine.plugins.manager import Plugins
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import CallboardError, PluginError

log = logging.getLogger(__name__)

SLOW_S = 0.05  # as long as several decode steps: clients notice


class Observers:
    """Calls every loaded observer with what happened; the end of ``hookspecs.py`` has the contract.

    It must be used on the scheduler's loop.  Exceptions of observers are logged, not raised.
    wants_requests: whether any observer implements the hook for requests that have ended."""

    def __init__(
        self,
        plugins: Plugins,
        options: Mapping[str, dict[str, Any]],
        *,
        page_size: int,
        model: str = "",
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Build the observers that have a constructor.

        options: per plugin name.  model: the name that it is served under.
        clock: seconds, to find slow observers.  wall_clock: Unix seconds.
        Raises PluginError if an observer refuses its options or has no hook that would be called."""
        self._clock = clock
        self._model = model
        self._wall_clock = wall_clock
        self._silenced: set[str] = set()
        self._slow: set[str] = set()
        built = dict.fromkeys(plugins.several.get(OBSERVER, ()), "")
        for impl in plugins.implementations("callboard_observer"):
            context = ObserverContext(page_size, options.get(impl.plugin_name, {}))
            observer = _build(plugins, impl, context)
            if observer is not None:
                # The name that log lines show; the module keeps its own.
                built[impl.plugin_name] = f"{impl.plugin_name} ({type(observer).__name__})"
                plugins.register(observer, built[impl.plugin_name])
        self._plugins = plugins
        self._look_up()
        called = {impl.plugin_name for impl in (*self._on_request_finished, *self._on_kv_event)}
        for name, built_name in built.items():
            if not called & {name, built_name}:
                raise PluginError(
                    f"plugin {name} observes nothing; it must implement callboard_request_finished or "
                    "callboard_kv_event, and mark it @hookimpl"
                )
            if not built_name and options.get(name):
                raise PluginError(f"plugin {name} takes no options: it does not implement callboard_observer")

    def _look_up(self) -> None:
        self._on_request_finished = self._plugins.implementations("callboard_request_finished")
        self._on_kv_event = self._plugins.implementations("callboard_kv_event")
        self.wants_requests = bool(self._on_request_finished)
        self._on_engine_stopped = self._plugins.implementations("callboard_engine_stopped")

    def add(self, observer: object, name: str) -> None:
        """Add an observer that no configuration names.  It gets KV events only if some observer did at the start.

        Raises PluginError if it has hooks that do not exist."""
        self._plugins.register(observer, name)
        self._look_up()

    @property
    def wants_kv_events(self) -> bool:
        """Whether any observer implements the hook for KV events; if not, they need not be recorded."""
        return bool(self._on_kv_event)

    def request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        """Call observers with requests that have ended."""
        if self._on_request_finished:
            now = self._wall_clock()
            # Requests for a frontend's observers have passed through the engine's, which have set both fields.
            stamped = [
                one if one.ended_at_unix_s else replace(one, model=self._model, ended_at_unix_s=now) for one in requests
            ]
            self._call(self._on_request_finished, requests=stamped)

    def kv_event(self, events: Sequence[KVEvent]) -> None:
        """Call observers with events of cached pages."""
        self._call(self._on_kv_event, events=events)

    def close(self) -> None:
        """Call every observer at the engine's end, even one that has raised: it may hold resources."""
        self._silenced.clear()
        self._call(self._on_engine_stopped)

    def _call(self, implementations: Sequence[HookImpl], **arguments: object) -> None:
        for impl in implementations:
            name = impl.plugin_name
            if name in self._silenced:
                continue
            began = self._clock()
            try:
                _invoke(impl, **arguments)
            except BaseException:  # even sys.exit: an observer must not end the server
                self._silenced.add(name)
                log.exception("plugin %s raised in %s and is not called again", name, impl.function.__name__)
            took_s = self._clock() - began
            if took_s > SLOW_S and name not in self._slow:
                self._slow.add(name)
                log.warning(
                    "plugin %s took %.0f ms in %s, and every request waited; it should hand its work to a thread",
                    name,
                    took_s * 1000,
                    impl.function.__name__,
                )


def _build(plugins: Plugins, impl: HookImpl, context: ObserverContext) -> object:
    try:
        return _invoke(impl, context=context)
    except CallboardError:
        raise
    except (Exception, SystemExit) as error:
        raise plugins.raised(impl.plugin_name, "callboard_observer", error) from error


def _invoke(impl: HookImpl, **arguments: object) -> object:
    """Call one plugin's hook as pluggy does, with the arguments that it names."""
    return impl.function(*[arguments[name] for name in impl.argnames])
