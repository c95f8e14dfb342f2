"""The terms of speculation that ranks get: which model drafts, and how many tokens."""

import msgspec

from engine.scheduling.proposer import DraftModel


class Terms(msgspec.Struct, frozen=True):
    """The proposer of the engine.  draft: the model that drafts; None if the planner does.  num_proposed: of a row."""

    num_proposed: int
    draft: DraftModel | None = None
