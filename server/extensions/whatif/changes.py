"""The questions to a trace: the settings as they were, with some of them changed, as a planner takes them.

Owns: which settings a prediction can follow, why it cannot follow others.  Does not know: time, durations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from engine.config import Config, with_overrides
from engine.features.traffic.recorder import RELEVANT
from engine.features.traffic.trace import TraceHead
from engine.plugins.deciders import plugin_policy, plugin_strategy
from engine.plugins.features import FeatureContext, planner_features
from engine.plugins.kinds import KINDS, PROPOSER, named
from engine.plugins.manager import Plugins
from engine.scheduling.planner import Planner
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import ConfigError

PLANNING = tuple(kind.name for kind in KINDS.values() if kind.decides and kind.name != PROPOSER)
ASKABLE = {
    "kv": ("num_pages", "page_size", "num_host_pages"),
    "scheduler": ("max_running", "max_step_tokens", "prefill_chunk", "itl_target_ms", "overlap_depth"),
    "plugins": (*PLANNING, "options"),
    "limits": (
        "max_requests", "max_queued_tokens", "max_requests_per_client", "first_token_timeout_s", "request_timeout_s",
    ),
}  # fmt: skip
EOS = 0  # what stands for all of a model's
NEEDS_NUMBER = ("kv.num_pages", "scheduler.max_running", "scheduler.max_step_tokens", "scheduler.prefill_chunk")


@dataclass(frozen=True, slots=True)
class Case:
    """A server to be predicted.  config: of what a prediction depends on; everything else is as by default."""

    name: str
    config: Config
    limits: PlannerLimits

    def planner(self, clock: Callable[[], float]) -> Planner:
        """The one that such a server has."""
        plugins = self.config.plugins
        chosen = Plugins({kind: named(plugins, kind) for kind in PLANNING}, plugins.options)
        strategy = plugin_strategy(chosen, self.config, self.limits.num_pages)
        features = planner_features(FeatureContext(self.config, None, 0, self.limits.state_bytes, plugins=chosen))
        return Planner(self.limits, strategy, plugin_policy(chosen, self.config), clock, features=features)


def as_recorded(head: TraceHead, name: str = "as it was") -> Case:
    """Raises ConfigError for a server that cannot be predicted at all."""
    try:
        config = msgspec.convert(head.settings, Config, strict=True)
    except msgspec.ValidationError as error:
        unknown = f"the trace has settings that this version does not know ({error})"
        raise ConfigError(f"{unknown}; it was recorded by callboard {head.version}") from None
    for kind in RELEVANT:
        if kind not in ASKABLE["plugins"] and (named := getattr(config.plugins, kind)) != "none":
            raise ConfigError(
                f"the trace was recorded with plugins.{kind}={named}, and a trace does not have what that answered; "
                f"record one with plugins.{kind}=none"
            )
    return Case(name, config, replace(head.limits, record_events=False, eos_token_ids=(EOS,)))


def changed(head: TraceHead, changes: Sequence[str]) -> Case:
    """Returns the head with other settings.

    changes: ``section.key=value``.  Raises ConfigError for those whose effect a planner does not see."""
    before = as_recorded(head)
    for change in changes:
        _check_askable(change.partition("=")[0].strip())
    config = with_overrides(before.config, changes)
    for key in NEEDS_NUMBER:
        section, _, name = key.partition(".")
        was, is_now = (getattr(getattr(one, section), name) for one in (before.config, config))
        if was and not is_now:
            raise ConfigError(f"{key}=0 is for a server to choose at its start; name a number")
    scheduler, kv = config.scheduler, config.kv
    if kv.page_size % head.block:
        raise ConfigError(
            f"kv.page_size={kv.page_size}: the trace distinguishes prompts by blocks of {head.block} tokens; "
            "pages must be a multiple of that"
        )
    num_pages = kv.num_pages or before.limits.num_pages * before.limits.page_size // kv.page_size
    limits = replace(
        before.limits,
        max_running=scheduler.max_running,
        max_step_tokens=scheduler.max_step_tokens,
        prefill_chunk=scheduler.prefill_chunk,
        itl_target_s=scheduler.itl_target_ms / 1000,
        page_size=kv.page_size,
        num_pages=num_pages,
        num_host_pages=getattr(kv, "num_host_pages", 0),  # of an optional folder
    )
    return Case(" ".join(changes), config, limits)


def _check_askable(key: str) -> None:
    section, _, name = key.partition(".")
    if name not in ASKABLE.get(section, ()):
        known = ", ".join(f"{one}.{key}" for one, keys in ASKABLE.items() for key in keys)
        raise ConfigError(
            f"--set {key}: the scheduler does not see this setting, so its effect cannot be computed from a trace; "
            f"measure it with callboard bench.  What can be asked: {known}"
        )
