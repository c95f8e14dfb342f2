"""A turn of the scheduler, as a recording keeps it: what arrived, the readings of its clock, and what it planned.

Owns: the record, and the digests by which plans, and the code that plans, are compared.
Does not know: files, rings, planners.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from engine.actors.inboxes import SchedulerInbox
from engine.messages import FeatureRequest, Step
from engine.plugins.features import feature_modules

# The code that plans.
PLANS = ("actors/scheduler.py", "scheduling/*.py", "kv/*.py", "features/*/planner.py", "features/*/messages.py")
PLAN_BYTES = 8
_encode = msgspec.msgpack.Encoder().encode


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages that were handled together, and the plans made for them.

    readings: float64[n], readings of the clock, in seconds, in their order.
    plans: ``plan_digest`` of each.  failure: the error that ended the scheduler in this turn, '' for none."""

    messages: tuple[SchedulerInbox, ...]
    readings: bytes = b""
    plans: bytes = b""
    failure: str = ""


def plan_digest(plan: Step | FeatureRequest) -> bytes:
    """Return a digest of a plan: all of it but the values of tokens, which a recording may have replaced."""
    if isinstance(plan, FeatureRequest):
        stripped = of_messages("without_content").get(plan.feature, bytes)
        told: tuple[object, ...] = (plan.feature, plan.number, len(stripped(plan.body)))
    else:
        admissions = [
            (one.row, len(one.token_ids), one.num_prompt_tokens, one.num_computed_tokens, one.pages)
            for one in plan.admissions
        ]
        told = (
            plan.step_id, admissions, plan.table_rows, plan.table_indexes, plan.table_pages, plan.decode_rows,
            plan.prefill_rows, plan.prefill_starts, plan.prefill_lengths, plan.prefill_samples,
            _comparable(plan.parts), plan.filled_pages, plan.num_copied,
        )  # fmt: skip
    return hashlib.blake2b(_encode(told), digest_size=PLAN_BYTES).digest()


def _comparable(parts: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """Return the parts of a step in the order of their names, without what follows from tokens."""
    stripped = of_messages("without_tokens")
    return [(name, stripped[name](part) if name in stripped else part) for name, part in sorted(parts.items())]


@cache
def of_messages(function: str) -> Mapping[str, Callable[..., Any]]:
    """Return name of a feature -> its function of this name, which the ``messages.py`` of its folder may have."""
    modules = feature_modules("messages")
    return {name: getattr(one, function) for name, one in modules.items() if hasattr(one, function)}


@cache
def planning_code() -> str:
    """Return a hash of the files that plan.  A recording with another hash may replay to other plans."""
    digest = hashlib.sha256()
    engine = Path(__file__).parents[2]
    for path in sorted(path for pattern in PLANS for path in engine.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def failure_of(error: BaseException) -> str:
    """Return the text of a failure in a recording."""
    return f"{type(error).__name__}: {error}"
