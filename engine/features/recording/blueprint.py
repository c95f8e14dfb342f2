"""The blueprint of a planner: everything but the model, so that another process builds one that makes the same plans.

Owns: the part of an engine's configuration that a recording needs.  Does not know: weights, devices, text, files.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from engine.config import SECRETS, Config
from engine.plugins.deciders import built_proposer, plugin_policy, plugin_strategy
from engine.plugins.features import FeatureContext, planner_features
from engine.plugins.kinds import PROPOSER
from engine.plugins.manager import Plugins
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel, Proposer
from engine.scheduling.rows import PlannerLimits

PLANS = ("actors/scheduler.py", "scheduling/*.py", "kv/*.py", "features/*/planner.py")  # the code that plans


class Blueprint(msgspec.Struct, frozen=True):
    """Everything that a planner is built from.

    limits: those of the planner; the number of pages is filled in when there is a pool.
    max_len: longest sequence, as proposers get it.
    names: kind -> full name of each chosen plugin of a kind that decides.
    draft: the model that proposes, if one does.
    config: without secrets, and with the options of those plugins only."""

    limits: PlannerLimits
    overlap_depth: int
    vocab_size: int
    max_len: int
    names: dict[str, str]
    config: Config
    draft: DraftModel | None = None

    def policy(self, plugins: Plugins) -> SchedulingPolicy:
        """Return a new policy.  It outlives planners.  Raises PluginError if it cannot be built."""
        return plugin_policy(plugins, self.config)

    def planner(
        self, plugins: Plugins, num_pages: int, clock: Callable[[], float], policy: SchedulingPolicy
    ) -> Planner:
        """Return a planner with new plugins of the other kinds.  Raises PluginError if one cannot be built."""
        limits = replace(self.limits, num_pages=num_pages, record_events=False)
        proposer: Proposer | DraftModel | None = self.draft
        if proposer is None and PROPOSER in self.names:
            proposer = built_proposer(plugins, self.vocab_size, self.max_len)
        features = planner_features(FeatureContext(self.config, proposer, self.vocab_size))
        strategy = plugin_strategy(plugins, self.config, num_pages)
        return Planner(limits, strategy, policy, clock, features=features)

    def plugins(self) -> Plugins:
        """Return the plugins that planned, loaded.  Raises PluginError if one is not installed."""
        chosen = {kind: name.partition(".")[2] for kind, name in self.names.items()}
        return Plugins(chosen, options=self.config.plugins.options)


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


@cache
def planning_code() -> str:
    """Return a hash of the files that plan.  A recording with another hash may replay to other plans."""
    digest = hashlib.sha256()
    engine = Path(__file__).parents[2]
    for path in sorted(path for pattern in PLANS for path in engine.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
