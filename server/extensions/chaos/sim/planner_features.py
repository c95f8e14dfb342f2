"""The features of a planner, as tests of scheduling switch them on."""

from functools import partial

from engine.features.host_tier.planner import HostTierPlanner
from engine.features.itl_target.planner import TargetPlanner
from engine.features.kv_store.planner import StorePlanner
from engine.features.late_masks.planner import LateMasks
from engine.features.lora.planner import LoraPlanner
from engine.features.quarantine.planner import QuarantinePlanner
from engine.features.shared_prefix.planner import SharedPrefixPlanner
from engine.features.speculation.planner import SpeculationPlanner
from engine.scheduling.feature import NewFeature
from engine.scheduling.proposer import DraftModel, Proposer
from server.extensions.chaos.sim.oracle import VOCAB


def features_of(
    proposer: Proposer | DraftModel | None = None,
    num_slots: int = 0,
    store_timeout_s: float = 0.0,
    *,
    has_host: bool = False,
    vocab_size: int = VOCAB,
) -> list[NewFeature]:
    """Return what builds the features that the arguments switch on."""
    features: list[NewFeature] = [SharedPrefixPlanner, TargetPlanner, QuarantinePlanner, LateMasks]
    if has_host:
        features.append(HostTierPlanner)
    if store_timeout_s:
        features.append(partial(StorePlanner, timeout_s=store_timeout_s))
    if num_slots:
        features.append(partial(LoraPlanner, num_slots=num_slots))
    if proposer is not None:
        features.append(partial(SpeculationPlanner, proposer=proposer, vocab_size=vocab_size))
    return features
