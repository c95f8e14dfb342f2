"""Speculation on a rank: a draft model or a head next to the model, and the tokens that it drafts for a step.

Owns: when tokens are drafted, and what a step does without if there is no memory for that.
Does not know: how tokens are drafted, what becomes of them.
A proposer that runs in the planner has nothing on a rank: its tokens are in the step.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from engine.actors.step_splitting import num_tokens
from engine.checkpoints.checkpoint import ModelSpec
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.features import RankContext, RankFeature
from engine.execution.launched_step import LaunchedStep
from engine.execution.needs import Needs
from engine.features.speculation.counted_decodes import CountedDecodes
from engine.features.speculation.draft_model import RankDraft
from engine.features.speculation.drafting import Drafted, Drafter
from engine.features.speculation.eagle_head import RankHead
from engine.features.speculation.known_lengths import KnownLengths
from engine.features.speculation.messages import NAME, Proposals, drafted_part, proposals_of
from engine.features.speculation.terms import Terms
from engine.graphs.decode import DecodeGraphs
from engine.layers.attention import AttentionBackend, is_capturable
from engine.layers.kv_pool import KVPool
from engine.messages import Step

log = logging.getLogger(__name__)

CPU_ALLOCATOR = "DefaultCPUAllocator"  # in the text of torch's RuntimeError on a CPU, which is no OutOfMemoryError


class SpeculationRank(RankFeature):
    """The feature of a rank that verifies proposed tokens, at most ``num_proposed`` of each row."""

    def __init__(self, context: RankContext, num_proposed: int) -> None:
        self._context = context
        self.more_samples = num_proposed

    def apply(self, step: Step) -> Step:
        """Write the tokens that the step names."""
        if NAME in step.parts:
            self._context.rows.write_tokens(*proposals_of(step).columns())
        return step


class DraftRank(SpeculationRank):
    """The feature of a rank that drafts the tokens of a step just before it.  draft: model or head with its weights."""

    order = 30

    def __init__(self, context: RankContext, draft: RankDraft, num_proposed: int) -> None:
        super().__init__(context, num_proposed)
        self.page_bytes = draft.page_bytes
        self._draft = draft
        self._drafter: Drafter
        self._drafted: Drafted | None = None
        self._decodes: CountedDecodes | None = None
        self._plans_nothing = False
        self._counting: Proposals | None = None  # of a step of which only the device knows the lengths, half launched
        self._known: KnownLengths | None = None  # of such a step, if it is launched in parts or again
        self._were_given = False  # the last drafted tokens are in the result of their step
        self._last_step = -1
        self._is_cut = False  # steps have been launched in parts

    def needs(self, needs: Needs) -> Needs:
        """Return what must stay free for both models."""
        return self._draft.needs(needs, self._context.max_len)

    def prepare(self, num_pages: int) -> None:
        """Allocate the draft's own pool, and let the model keep the states that the draft reads."""
        self._draft.prepare(num_pages)
        self.pools = self._draft.kept_pools

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        """Return the attention backend.  One that plans on the host must know all lengths there."""
        self._plans_nothing = is_capturable(backend)
        return backend

    def decodes(self, whole: CapturedDecodes) -> CapturedDecodes:
        """Return captured decodes that also run steps of which only the device knows the lengths, if there are any."""
        behind = (type(one).decodes for one in self._context.features if one.order > self.order)
        if any(decodes is not RankFeature.decodes for decodes in behind):
            return whole  # one may leave out steps that it must run itself
        if not (isinstance(whole, DecodeGraphs) and whole.verifies and self._plans_nothing):
            return whole
        self._decodes = CountedDecodes(whole)
        return self._decodes

    def graph_bytes(self) -> int:
        """Return the bytes that the drafter's graphs will take."""
        return self._draft.graph_bytes(self._new_drafter())

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Build the drafter over the draft's pool."""
        self._drafter = self._new_drafter()
        self._draft.capture(self._drafter)

    def _new_drafter(self) -> Drafter:
        return self._draft.drafter(self._context.rows, self._context.spec.vocab_size)

    def with_weights(self, spec: ModelSpec) -> Callable[[], None] | None:
        """Read the model's own layer again, or a draft that was freed."""
        return self._draft.with_weights(spec)

    def without_weights(self) -> None:
        """Free the draft's weights."""
        self._draft.without_weights()

    def page_memory(self) -> Sequence[torch.Tensor]:
        """Return the draft's own pool."""
        return self._draft.page_memory()

    def apply(self, step: Step) -> Step:
        """Draft the tokens that the step names.  A step that is launched again in parts has lost them."""
        self._drafted = None
        is_again = step.step_id == self._last_step
        self._is_cut |= is_again
        self._last_step = step.step_id
        if not is_again:
            self._known = None
        proposals = proposals_of(step)
        if proposals.counted:
            self._drafter.count(given=self._were_given)
            self._counting = proposals
        if self._counting is not None:
            self._begin_counted(step, self._counting, is_again=is_again)
        if self._known is not None:
            step, proposals = self._known.step(step), self._known.proposals(proposals)
        self._drafter.follow(step, self._context.rows.computed)
        if proposals.rows:
            self._were_given = False
            self._drafted = self._draft_for(step, proposals)
        return step

    def _begin_counted(self, step: Step, proposals: Proposals, *, is_again: bool) -> None:
        """Let the device count the tokens of the step before, all parts of which are queued.

        A step that is launched in parts, or again, is stated with its lengths, for which the host waits."""
        assert self._decodes is not None, "ranks without graphs have said that they count tokens"
        counted = np.frombuffer(proposals.counted, dtype=np.int32)
        if not is_again and num_tokens(step) == len(counted) + len(proposals.rows) // 4:
            self._decodes.counted = counted
            return
        lengths_R = self._drafter.known()
        self._known, self._counting, self._decodes.counted = KnownLengths(proposals, lengths_R), None, None
        self._context.rows.computed[counted] = lengths_R[counted]

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        """Add the drafted tokens to the result: its event comes after their copy to the host."""
        if self._counting is not None:
            assert self._decodes is not None
            assert self._decodes.counted is None, f"step {step.step_id} has not run by graphs"
            self._counting = None
        if (drafted := self._drafted) is not None:
            self._were_given = True
            launched.parts[NAME] = lambda: drafted_part(drafted.by_row(), self._most_places)

    @property
    def _most_places(self) -> int:
        """The tokens of a step whose lengths the device counts; 0 if the rank needs the host for that.

        Where memory is short a step is launched in parts, and the host would wait for the lengths of each."""
        if self._decodes is None or self._is_cut or not self._drafter.by_graph:
            return 0
        return self._decodes.most_places

    def _draft_for(self, step: Step, proposals: Proposals) -> Drafted:
        """Return the drafted tokens, or none if the device has no memory for that: the step verifies what it finds.

        Raises MemoryError if other ranks may be in the middle of drafting.  RuntimeError then for a model with states:
        its steps cannot be cut into parts, since copies of states belong before and behind a whole step."""
        try:
            return self._drafter.draft(step, proposals)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and CPU_ALLOCATOR not in str(error):
                raise
            if self._context.comm.size > 1:
                if self._context.states is not None:
                    raise RuntimeError(f"no room to draft for a step that cannot be cut: {error}") from error
                raise MemoryError(str(error)) from None
            rows_B = np.unique(proposals.columns()[0])
            log.warning("the device has no room to draft for %d rows (%s)", len(rows_B), error)
            none_B = np.zeros(len(rows_B), dtype=np.int64)
            return Drafted(rows_B, none_B, torch.zeros((len(rows_B), 0), dtype=torch.int32))


def rank_feature(context: RankContext) -> SpeculationRank | None:
    """Return the feature that drafts or verifies tokens here, or None if no proposer is configured.

    Raises ConfigError, WeightsError, PluginError, as for the model itself."""
    if (given := context.given.get(NAME)) is None:
        return None
    terms = msgspec.msgpack.decode(given, type=Terms)
    if (draft := terms.draft) is not None:
        kind = RankHead if draft.reads_states else RankDraft
        return DraftRank(context, kind(draft, context), terms.num_proposed)
    return SpeculationRank(context, terms.num_proposed)
