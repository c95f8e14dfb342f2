"""Builds the plugins that make decisions for the scheduler: eviction strategy, scheduling policy, proposer.

Owns: the calls to these plugins, and a guard around those of other packages.  Does not know: their decisions.
"""

from engine.config import Config
from engine.kv.eviction import EvictionStrategy
from engine.plugins.guards import GuardedStrategy, guarded
from engine.plugins.hookspecs import EvictionContext, PolicyContext, ProposerContext
from engine.plugins.kinds import PROPOSER
from engine.plugins.manager import Plugins
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel, Proposer
from engine.types.errors import PluginError

MOST_PROPOSED = 64  # most draft tokens of a row in a step


def plugin_strategy(plugins: Plugins, config: Config, num_pages: int) -> EvictionStrategy:
    """Build the eviction strategy.  Raises PluginError if the plugin raises or returns something else."""
    name = plugins.names["eviction"]
    strategy = plugins.build(name, EvictionContext(config.kv.page_size, num_pages), EvictionStrategy)
    return strategy if plugins.known[name].built_in else GuardedStrategy(name, strategy)


def policy_choice(plugins: Plugins, config: Config) -> tuple[str, PolicyContext]:
    """Return the configured policy's name and context; a policy is kept, with its state, while these are unchanged."""
    name = plugins.names["policy"]
    return name, PolicyContext(config.scheduler.max_running, config.kv.page_size, plugins.options.get(name, {}))


def plugin_policy(plugins: Plugins, config: Config) -> SchedulingPolicy:
    """Build the scheduling policy.  Raises PluginError if the plugin raises or returns something else."""
    name, context = policy_choice(plugins, config)
    policy = plugins.build(name, context, SchedulingPolicy)
    return policy if plugins.known[name].built_in else guarded(name, policy)


def built_proposer(plugins: Plugins, vocab_size: int, max_len: int) -> Proposer | DraftModel | None:
    """Return what the configured plugin builds, with the path of a draft model unresolved; None if there is none.

    Raises PluginError."""
    if (name := plugins.names.get(PROPOSER)) is None:
        return None
    built = plugins.build(name, ProposerContext(vocab_size, max_len), Proposer, DraftModel)
    assert isinstance(built, Proposer | DraftModel), f"{name} has built {built!r}"
    if type(built.num_tokens) is not int or not 1 <= built.num_tokens <= MOST_PROPOSED:
        observed = f"num_tokens is {built.num_tokens!r:.100}"
        raise PluginError(f"plugin {name}: {observed}, expected an int from 1 to {MOST_PROPOSED}")
    return built
