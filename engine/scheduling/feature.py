"""Features of the planner: the hooks that an optional part may have, and how the planner calls them.

Owns: the hooks of a feature, and the parts of the planner that it gets.  Does not know: which features there are.
A feature lies in a folder of ``engine/features`` and is built with each planner.  The hooks are looked up once, when
the planner is built: a hook that no feature overrides costs nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.kv.node import Handle
from engine.kv.pages import Pages
from engine.messages import Admit, FeatureAnswer, FeatureRequest, StepDone
from engine.scheduling.events import Callbacks, PlannerEvents, Why, callbacks
from engine.scheduling.rows import PlannerLimits, RowTable, Sequence
from engine.scheduling.step_builder import InFlight, StepBuilder, Wave
from engine.types.notices import LossExplained

if TYPE_CHECKING:
    from engine.scheduling.completions import Completions
    from engine.scheduling.decodes import Decodes
    from engine.scheduling.pages import PageManager
    from engine.scheduling.prefills import Prefills
    from engine.scheduling.requests import Requests


@dataclass(slots=True)
class PlannerParts:
    """The parts of one planner, for each other and for its features.  Those after ``events`` are added as it is built.

    clock: seconds."""

    limits: PlannerLimits
    clock: Callable[[], float]
    table: RowTable
    features: "PlannerFeatures"
    events: PlannerEvents
    pages: "PageManager" = field(init=False)
    decodes: "Decodes" = field(init=False)
    prefills: "Prefills" = field(init=False)
    requests: "Requests" = field(init=False)
    completions: "Completions" = field(init=False)


class PlannerFeature:
    """An optional part of one planner.  A subclass overrides the hooks that it needs.

    order: features of lower order come first.
    part: name of its parts in results of steps, '' for none.
    is_on: whether the hooks are called; ``PlannerFeatures.refresh`` must follow a change."""

    order = 0
    part = ""
    is_on = True

    def admit(self, sequence: Sequence, message: Admit) -> None:
        """Called when a request arrives.  Raise RequestError to refuse it."""

    def hold(self, sequence: Sequence) -> Why | None:
        """Return a reason to keep a sequence whose turn has come; the feature later passes it to ``Prefills.wait``."""
        return None

    def blocks(self) -> bool:
        """Return True to start no sequence now."""
        return False

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether a sequence may start now, as far as the feature is concerned."""
        return True

    def shared_tokens(self, row: int, most: int, least: int) -> int:
        """Return the number of tokens, at most ``most``, of a row's prompt that another one can use in a while.

        Fewer than ``least`` are of no use to it."""
        return most

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        """Called before a sequence starts.  pages: free pages after those of the handle, which the tree may adopt."""

    def started(self, sequence: Sequence) -> None:
        """Called when a sequence has got a row."""

    def prefill_tokens(self, num_decodes: int, most: int) -> int:
        """Return the number of prompt tokens, at most ``most``, for a step that has ``num_decodes`` decodes."""
        return most

    def chunk_tokens(self, row: int, most: int) -> int:
        """Return the number of tokens, at most ``most``, by which a step goes on with a row's prompt.

        It may be 0 only where a chunk of the prompt is in the step already, and exceed ``most`` only where none is."""
        return most

    def verified_tokens(self, row: int, most: int) -> int:
        """Return the number of tokens, at most ``most``, that a step may verify behind the known ones of a row."""
        return most

    def recomputed_tokens(self, row: int) -> int:
        """Return the number of known tokens before a row's last one that its next step computes again.

        More than 0 is possible only for a row of which a step has verified tokens, if some were wrong."""
        return 0

    def waits(self, num_in_flight: int) -> bool:
        """Return True to plan nothing now.  num_in_flight: steps that have not completed."""
        return False

    def plan(self, step: StepBuilder) -> None:
        """Change the batch of a step that is being planned."""

    def attach(self, step: StepBuilder) -> None:
        """Add to a step whose batch is complete."""

    def take(self, part: bytes, done: StepDone) -> bool:
        """Read the part of a step's result that has the feature's ``part`` as its name, before anything else is read.

        It is called even while the feature is off.  Return whether a row has ended because of it."""
        return False

    def waves(self, record: InFlight, wave: Wave) -> list[Wave]:
        """Return the sampled tokens of a step as waves, at most one token of a row in each."""
        return [wave]

    def completed(self, record: InFlight, seconds: float) -> None:
        """Called when the tokens of a step are noted.  seconds: time since the completion of the step before it."""

    def published(self, row: int, num_tokens: int) -> None:
        """Called when the first ``num_tokens`` tokens of a row's prompt are in the tree, as far as they fill pages."""

    def left(self, row: int) -> None:
        """Called when a row is no longer in the batch."""

    def released(self, row: int) -> None:
        """Called before a row is free: no step in flight uses it any more."""

    def ended(self, sequence: Sequence) -> None:
        """Called when a request has ended."""

    def lost(self, *, is_fault: bool) -> LossExplained | None:
        """Called when the executors are gone, even while the feature is off.

        It may end a request that caused losses, and return the explanation.  is_fault: as in ``ExecutorsLost``."""
        return None

    def forget(self, sequence: Sequence) -> bool:
        """Called when a sequence without a row has ended.  Return whether the feature held it."""
        return False

    def pages_lost(self) -> None:
        """Called when no page is in use and nothing is cached any more, while executors stay."""

    def outgoing(self) -> list[FeatureRequest]:
        """Return the messages for the executors since the last call."""
        return []

    def received(self, message: FeatureAnswer) -> None:
        """Called when an executor has answered a message of ``outgoing``, even while the feature is off."""

    def reset(self) -> list[Sequence]:
        """Called when the executors are new and nothing is in flight.  Return the sequences that the feature held."""
        return []

    def succeeds(self, other: "PlannerFeature") -> None:
        """Called when the planner goes on with the requests of another one.  other: the feature of that one."""

    def retuned(self, limits: PlannerLimits) -> None:
        """Called when the limits have changed."""

    def gauges(self) -> dict[str, int]:
        """Return numbers of the present state, by name."""
        return {}

    def num_held(self) -> int:
        """Return the number of sequences that the feature holds."""
        return 0


NewFeature = Callable[[PlannerParts], PlannerFeature]


class PlannerFeatures:
    """The hooks of a planner's features.

    It is empty until ``install``: features are built from the planner's parts, and some of these have it already."""

    def __init__(self) -> None:
        self.install(())

    def install(self, features: Iterable[PlannerFeature]) -> None:
        """Use the hooks of these features from now on."""
        self.all = tuple(sorted(features, key=lambda one: one.order))
        self.take = {one.part: one.take for one in self.all if one.part}
        self.admit = self._hooks("admit")
        self.hold = self._hooks("hold")
        self.blocks = self._hooks("blocks")
        self.has_room = self._hooks("has_room")
        self.shared_tokens = self._hooks("shared_tokens")
        self.adopt = self._hooks("adopt")
        self.started = self._hooks("started")
        self.prefill_tokens = self._hooks("prefill_tokens")
        self.chunk_tokens = self._hooks("chunk_tokens")
        self.verified_tokens = self._hooks("verified_tokens")
        self.recomputed_tokens = self._hooks("recomputed_tokens")
        self.waits = self._hooks("waits")
        self.plan = self._hooks("plan")
        self.attach = self._hooks("attach")
        self.waves = self._hooks("waves")
        self.completed = self._hooks("completed")
        self.published = self._hooks("published")
        self.left = self._hooks("left")
        self.released = self._hooks("released")
        self.ended = self._hooks("ended")
        self.num_held = self._hooks("num_held")
        self.forget = self._hooks("forget")
        self.pages_lost = self._hooks("pages_lost")
        self.outgoing = self._hooks("outgoing")
        self.received = callbacks(self.all, PlannerFeature, "received")

    def _hooks(self, name: str) -> Callbacks:
        return callbacks([one for one in self.all if one.is_on], PlannerFeature, name)

    def retuned(self, limits: PlannerLimits) -> None:
        """Pass new limits to every feature; it may switch on or off."""
        for one in self.all:
            one.retuned(limits)
        self.refresh()

    def succeed(self, others: "PlannerFeatures") -> None:
        """Pass each feature the one of its kind among those of another planner."""
        by_kind = {type(one): one for one in others.all}
        for one in self.all:
            if (other := by_kind.get(type(one))) is not None:
                one.succeeds(other)

    def lost(self, *, is_fault: bool) -> LossExplained | None:
        """Pass a loss to every feature.  Return the explanation, if there is one."""
        explained = [one.lost(is_fault=is_fault) for one in self.all]
        return next(filter(None, explained), None)

    def refresh(self) -> None:
        """Look the hooks up again, after a feature has switched on or off."""
        self.install(self.all)

    def gauges(self) -> dict[str, int]:
        """Return the features' numbers of the present state, by name."""
        return {name: number for one in self.all for name, number in one.gauges().items()}

    def reset(self) -> list[Sequence]:
        """Reset every feature.  Return the sequences that they held."""
        return [sequence for one in self.all for sequence in one.reset()]
