"""The observers of one engine: tells each what happened, and lets none of them do harm.

Owns: which plugins are told what, and who has raised and is told nothing any more.
Does not know: what they do with it, when something happens.
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
    """Tells every loaded observer what happened; the end of ``hookspecs.py`` has the contract.

    Call it from the scheduler's loop only.  It swallows whatever an observer raises, and logs it."""

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
        """Build the observers that have a constructor.  options: per plugin name.  model: the name it is served under.
        clock: seconds, to find slow ones.  wall_clock: Unix seconds.

        Raises PluginError if one refuses its options or would never be told anything."""
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
        told = {impl.plugin_name for impl in (*self._on_request_finished, *self._on_kv_event)}
        for name, built_name in built.items():
            if not told & {name, built_name}:
                raise PluginError(
                    f"plugin {name} observes nothing; it must implement callboard_request_finished or "
                    "callboard_kv_event, and mark it @hookimpl"
                )
            if not built_name and options.get(name):
                raise PluginError(f"plugin {name} takes no options: it does not implement callboard_observer")

    def _look_up(self) -> None:
        self._on_request_finished = self._plugins.implementations("callboard_request_finished")
        self._on_kv_event = self._plugins.implementations("callboard_kv_event")
        self._on_engine_stopped = self._plugins.implementations("callboard_engine_stopped")

    def add(self, observer: object, name: str) -> None:
        """Add an observer that no configuration names.  It hears of KV events only if some observer did at the start.

        Raises PluginError if it has hooks that do not exist."""
        self._plugins.register(observer, name)
        self._look_up()

    @property
    def wants_kv_events(self) -> bool:
        """Whether any observer listens to KV events; if none does, they need not be recorded."""
        return bool(self._on_kv_event)

    def request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        """Tell observers which requests have ended."""
        if self._on_request_finished:
            now = self._wall_clock()
            # A frontend's observers hear of requests through the engine's, which have said both.
            told = [
                one if one.ended_at_unix_s else replace(one, model=self._model, ended_at_unix_s=now) for one in requests
            ]
            self._tell(self._on_request_finished, requests=told)

    def kv_event(self, events: Sequence[KVEvent]) -> None:
        """Tell observers what happened to cached pages."""
        self._tell(self._on_kv_event, events=events)

    def close(self) -> None:
        """Tell every observer that the engine has ended, also one that has raised: it may hold something."""
        self._silenced.clear()
        self._tell(self._on_engine_stopped)

    def _tell(self, implementations: Sequence[HookImpl], **arguments: object) -> None:
        for impl in implementations:
            name = impl.plugin_name
            if name in self._silenced:
                continue
            began = self._clock()
            try:
                _call(impl, **arguments)
            except BaseException:  # sys.exit as well: a server ends by its operator's word, not by an observer's
                self._silenced.add(name)
                log.exception("plugin %s raised in %s and is told nothing any more", name, impl.function.__name__)
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
        return _call(impl, context=context)
    except CallboardError:
        raise
    except (Exception, SystemExit) as error:
        raise plugins.raised(impl.plugin_name, "callboard_observer", error) from error


def _call(impl: HookImpl, **arguments: object) -> object:
    """Call one plugin's hook as pluggy does: with the arguments that it names."""
    return impl.function(*[arguments[name] for name in impl.argnames])
