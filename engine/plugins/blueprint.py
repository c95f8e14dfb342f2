"""The blueprint of a planner: everything but the model, so that another process builds one that makes the same plans.

Owns: the part of an engine's configuration that decides plans, and the building of planners.
Does not know: weights, devices, text, files.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from engine.config import SECRETS, Config
from engine.plugins.deciders import built_proposer, plugin_policy, plugin_strategy, policy_choice
from engine.plugins.features import FeatureContext, planner_features
from engine.plugins.manager import Plugins
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel
from engine.scheduling.rows import PlannerLimits


class Blueprint(msgspec.Struct, frozen=True):
    """Everything that a planner is built from.

    limits: those of the planner; the number of pages is filled in when there is a pool.
    max_len: longest sequence, as proposers get it.
    names: kind -> full name of each chosen plugin of a kind that decides.
    draft: the model that proposes, if one does.
    found: names of features that have facts of the model.
    config: without secrets, and with the options of those plugins only."""

    limits: PlannerLimits
    overlap_depth: int
    vocab_size: int
    max_len: int
    names: dict[str, str]
    config: Config
    draft: DraftModel | None = None
    found: tuple[str, ...] = ()

    def policy(self, plugins: Plugins) -> SchedulingPolicy:
        """Return a new policy.  It outlives planners.  Raises PluginError if it cannot be built."""
        return plugin_policy(plugins, self.config)

    def planner(
        self,
        plugins: Plugins,
        limits: PlannerLimits,
        clock: Callable[[], float],
        policy: SchedulingPolicy,
        watchers: Iterable[object] = (),
    ) -> Planner:
        """Return a planner with new plugins of the other kinds.  Raises PluginError if one cannot be built.

        limits: those of the blueprint, for a pool."""
        proposer = self.draft or built_proposer(plugins, self.vocab_size, self.max_len)
        given = FeatureContext(self.config, proposer, self.vocab_size, limits.state_bytes, self.found, plugins)
        features = planner_features(given)
        strategy = plugin_strategy(plugins, self.config, limits.num_pages)
        return Planner(limits, strategy, policy, clock, features=features, watchers=watchers)

    def plugins(self) -> Plugins:
        """Return the plugins that planned, loaded.  Raises PluginError if one is not installed."""
        chosen = {kind: name.partition(".")[2] for kind, name in self.names.items()}
        return Plugins(chosen, options=self.config.plugins.options)


class BlueprintPlanners:
    """The planners of a blueprint, for ``Scheduler``.

    plugins: those of the blueprint, loaded.  load: returns those of another one.  watchers: of every planner.
    began: called with the limits of a planner that begins to work, or that works with other settings from now on.
    record_events: as in ``PlannerLimits``, whatever the blueprint has.
    policy: outlives planners, and is replaced when another one, or another option of it, is chosen."""

    def __init__(
        self,
        blueprint: Blueprint,
        plugins: Plugins,
        clock: Callable[[], float],
        *,
        load: Callable[[Blueprint], Plugins] = Blueprint.plugins,
        watchers: Iterable[object] = (),
        began: Callable[[PlannerLimits], None] = lambda limits: None,
        record_events: bool = False,
    ) -> None:
        self.blueprint = blueprint
        self.policy = blueprint.policy(plugins)
        self._plugins = plugins
        self._clock = clock
        self._load = load
        self._watchers = watchers
        self._began = began
        self._record_events = record_events

    @property
    def overlap_depth(self) -> int:
        """The most steps in flight."""
        return self.blueprint.overlap_depth

    def build(self, num_pages: int) -> Planner:
        """Return a planner for a pool of so many pages."""
        limits = self._limits(num_pages)
        self._began(limits)
        return self.blueprint.planner(self._plugins, limits, self._clock, self.policy, self._watchers)

    def change(self, blueprint: bytes) -> None:
        """Build from another blueprint from now on.  Raises PluginError."""
        new = msgspec.msgpack.decode(blueprint, type=Blueprint)
        plugins = self._load(new)
        if policy_choice(plugins, new.config) != policy_choice(self._plugins, self.blueprint.config):
            self.policy = new.policy(plugins)
        self.blueprint, self._plugins = new, plugins

    def retune(self, planner: Planner) -> None:
        """Give a planner the settings of the blueprint that can change while it works."""
        limits = self._limits(planner.requests.limits.num_pages)
        self._began(limits)
        planner.retune(limits, self.policy)

    def go_on_with(self, policy: SchedulingPolicy, clock: Callable[[], float]) -> None:
        """Use the policy and the clock of a planner that was read from a recording."""
        self.policy, self._clock = policy, clock

    def _limits(self, num_pages: int) -> PlannerLimits:
        return replace(self.blueprint.limits, num_pages=num_pages, record_events=self._record_events)


def without_secrets(config: Config, names: dict[str, str]) -> Config:
    """Return the part of a configuration that may be written to a file."""
    sections = {}
    for name in config.__struct_fields__:
        section = getattr(config, name)
        hidden = {field: type(getattr(section, field))() for field in SECRETS & {*section.__struct_fields__}}
        sections[name] = msgspec.structs.replace(section, **hidden)
    options = {name: table for name, table in config.plugins.options.items() if name in names.values()}
    sections["plugins"] = msgspec.structs.replace(config.plugins, options=options)
    return msgspec.structs.replace(config, **sections)
