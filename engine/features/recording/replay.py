"""A recording turn by turn: what arrived, what was planned and why, and which invariants do not hold.

Owns: the order of things, the comparison with what was recorded.  Does not know: how it is shown, files.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.features.recording.file import Recording, RecordingError
from engine.features.recording.invariants import Invariants
from engine.features.recording.reasons import Reasons
from engine.features.recording.replayed import ReplayedScheduler
from engine.features.recording.state import state_of
from engine.features.recording.turns import PLAN_BYTES, Turn, failure_of
from engine.messages import FeatureRequest, Step
from engine.plugins.manager import Plugins
from engine.types.errors import CallboardError


@dataclass(frozen=True, slots=True)
class Played:
    """A turn that has been played.

    at: seconds since the first one.  reasons: sentences.  plans: each in a line.
    differs: index of the first plan that is not the recorded one, None if there is none.
    fault: the error, or the invariant that does not hold; '' for none."""

    number: int
    turn: Turn
    at: float
    reasons: list[str]
    plans: list[str]
    differs: int | None
    fault: str


@dataclass
class Replay:
    """A replay of a recording; iterate over it once.

    check_every: turns between two checks of all bookkeeping.  ``tells``: whether reasons are wanted.
    digest: SHA-256 over all plans so far.  recorded_digest: the same over the recorded plans.
    fault: the first one."""

    recording: Recording
    check_every: int = 1
    tells: bool = True
    num_turns: int = 0
    num_plans: int = 0
    fault: str = ""
    _now: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    _then: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """The digest of the plans, in hex."""
        return self._now.hexdigest()

    @property
    def recorded_digest(self) -> str:
        """The digest of the recorded plans, in hex."""
        return self._then.hexdigest()

    def __iter__(self) -> Iterator[Played]:
        """Play the turns, up to the first that fails.  Raises RecordingError, PluginError before the first one."""
        scheduler, first_at = new_scheduler(self.recording), None
        invariants, reasons = Invariants(self.check_every), None
        for number, turn in enumerate(self.recording.turns):
            planner = scheduler.planner
            if self.tells and planner is not None and (reasons is None or reasons.planner is not planner):
                reasons = Reasons(planner)
            plans, fault = play(scheduler, invariants, turn)
            self._now.update(plans)
            self._then.update(turn.plans)
            if first_at is None and turn.readings:
                first_at = float(np.frombuffer(turn.readings, dtype=np.float64)[0])
            self.num_turns, self.num_plans = number + 1, self.num_plans + len(scheduler.plans)
            self.fault = fault
            yield Played(
                number,
                turn,
                scheduler.clock.now - (first_at or 0.0),
                reasons.take() if reasons is not None else [],
                [_line(plan, reasons) for plan in scheduler.plans],
                _first_difference(plans, turn.plans),
                fault,
            )
            if fault:
                return


def new_scheduler(recording: Recording, plugins: Plugins | None = None) -> ReplayedScheduler:
    """Return the scheduler in the state in which the recording begins.  Raises RecordingError, PluginError."""
    blueprint = recording.header.blueprint
    plugins = plugins if plugins is not None else blueprint.plugins()
    scheduler = ReplayedScheduler(blueprint, plugins)
    if recording.state:
        modules = [plugins.known[name].module for name in blueprint.names.values()]
        try:
            scheduler.begin_with(state_of(recording.state, modules))
        except CallboardError as error:
            raise RecordingError(f"{error}; it was written by callboard {recording.header.version}") from None
    return scheduler


def play(scheduler: ReplayedScheduler, invariants: Invariants, turn: Turn) -> tuple[bytes, str]:
    """Play one turn.  Return the digests of its plans and its fault, '' for none."""
    plans, fault = b"", ""
    try:
        plans = scheduler.play(turn)
    except Exception as error:  # the scheduler's or a plugin's: finding it is the purpose of a replay
        fault = failure_of(error)
    else:
        try:
            invariants.check(scheduler)
        except AssertionError as error:
            fault = f"does not hold: {error}"
    return plans, fault


def _line(plan: Step | FeatureRequest, reasons: Reasons | None) -> str:
    return reasons.of(plan) if reasons is not None else ""


def _first_difference(now: bytes, then: bytes) -> int | None:
    for at in range(0, max(len(now), len(then)), PLAN_BYTES):
        if now[at : at + PLAN_BYTES] != then[at : at + PLAN_BYTES]:
            return at // PLAN_BYTES
    return None
