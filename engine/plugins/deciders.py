"""From a configuration to the plugins that decide in the scheduler: who is evicted, who is next, what is proposed.

Owns: asking these plugins, and a guard around those of other packages.  Does not know: what they decide.
"""

from functools import partial

from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.kv.eviction import EvictionStrategy
from engine.plugins.guards import GuardedStrategy, guarded
from engine.plugins.hookspecs import EvictionContext, PolicyContext, ProposerContext
from engine.plugins.kinds import PROPOSER
from engine.plugins.manager import Plugins
from engine.scheduling.planner import NewDrafts
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel, Proposer
from engine.text.vocabulary import Vocabulary
from engine.types.errors import PluginError

MOST_PROPOSED = 64  # for a row at a time; no text is guessed further


def plugin_strategy(plugins: Plugins, config: Config, num_pages: int) -> EvictionStrategy:
    """Raises PluginError, as the others do, if the plugin raises or gives something else."""
    name = plugins.names["eviction"]
    strategy = plugins.build(name, EvictionContext(config.kv.page_size, num_pages), EvictionStrategy)
    return strategy if plugins.known[name].built_in else GuardedStrategy(name, strategy)


def policy_choice(plugins: Plugins, config: Config) -> tuple[str, PolicyContext]:
    """Which policy is asked for: where this stays the same, so does the policy, with what it has learnt."""
    name = plugins.names["policy"]
    return name, PolicyContext(config.scheduler.max_running, config.kv.page_size, plugins.options.get(name, {}))


def plugin_policy(plugins: Plugins, config: Config) -> SchedulingPolicy:
    name, context = policy_choice(plugins, config)
    policy = plugins.build(name, context, SchedulingPolicy)
    return policy if plugins.known[name].built_in else guarded(name, policy)


def plugin_proposer(
    plugins: Plugins, config: Config, spec: ModelSpec, max_len: int, vocabulary: Vocabulary
) -> Proposer | DraftModel | None:
    """None if no proposer is named.  A draft model is there, and its path resolved.  Others: of the model.

    Raises WeightsError as well, for a draft model that cannot be read."""
    if PROPOSER not in plugins.names:
        return None
    built = built_proposer(plugins, spec.vocab_size, max_len)
    if isinstance(built, DraftModel):
        from engine.plugins.draft_models import fitting_draft, fitting_head  # as below

        if built.reads_states:
            return fitting_head(built, plugins.names[PROPOSER], config, spec, max_len)
        return fitting_draft(built, plugins.names[PROPOSER], config, spec, vocabulary)
    return built


def built_proposer(plugins: Plugins, vocab_size: int, max_len: int) -> Proposer | DraftModel:
    """What the chosen plugin builds, as it is."""
    name = plugins.names[PROPOSER]
    built = plugins.build(name, ProposerContext(vocab_size, max_len), Proposer, DraftModel)
    assert isinstance(built, Proposer | DraftModel), f"{name} has built {built!r}"
    if type(built.num_tokens) is not int or not 1 <= built.num_tokens <= MOST_PROPOSED:
        observed = f"num_tokens is {built.num_tokens!r:.100}"
        raise PluginError(f"plugin {name}: {observed}, expected an int from 1 to {MOST_PROPOSED}")
    return built


def plugin_drafts(proposer: Proposer | DraftModel | None, vocab_size: int) -> NewDrafts | None:
    """None if nobody proposes.  vocab_size: of the model."""
    if proposer is None:
        return None
    from engine.scheduling.drafts import Drafts  # nobody else needs it

    return partial(Drafts, proposer=proposer, vocab_size=vocab_size)
