"""From a configuration to the plugins that decide in the scheduler: who is evicted, who is next, what is proposed.

Owns: asking these plugins, and a guard around those of other packages.  Does not know: what they decide.
"""

from functools import partial

from engine.config import Config
from engine.kv.eviction import EvictionStrategy
from engine.plugins.guards import GuardedStrategy, guarded
from engine.plugins.hookspecs import EvictionContext, PolicyContext, ProposerContext
from engine.plugins.manager import PROPOSER, Plugins
from engine.scheduling.planner import NewDrafts
from engine.scheduling.policy import SchedulingPolicy


def plugin_strategy(plugins: Plugins, config: Config, num_pages: int) -> EvictionStrategy:
    """Raises PluginError, as the others do, if the plugin raises or gives something else."""
    name = plugins.names["eviction"]
    context = EvictionContext(config.kv.page_size, num_pages, config.plugins.options.get(name, {}))
    strategy = plugins.build(name, "callboard_eviction_strategy", context, EvictionStrategy)
    return strategy if plugins.known[name].built_in else GuardedStrategy(name, strategy)


def plugin_policy(plugins: Plugins, config: Config) -> SchedulingPolicy:
    name = plugins.names["policy"]
    options = config.plugins.options.get(name, {})
    context = PolicyContext(config.scheduler.max_running, config.kv.page_size, options)
    policy = plugins.build(name, "callboard_scheduling_policy", context, SchedulingPolicy)
    return policy if plugins.known[name].built_in else guarded(name, policy)


def plugin_drafts(plugins: Plugins, config: Config, *, vocab_size: int, max_len: int) -> NewDrafts | None:
    """None if no proposer is named."""
    if (name := plugins.names.get(PROPOSER)) is None:
        return None
    from engine.scheduling.drafts import Drafts  # nobody else needs it
    from engine.scheduling.proposer import Proposer

    context = ProposerContext(vocab_size, max_len, config.plugins.options.get(name, {}))
    proposer = plugins.build(name, "callboard_proposer", context, Proposer)
    return partial(Drafts, proposer=proposer, vocab_size=vocab_size)
