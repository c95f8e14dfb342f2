"""A client's request to split engines.

Owns: how far it is.  Does not know: which engine is chosen for it.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from server.extensions.chaos.sim.luck import luck
from server.extensions.chaos.sim.oracle import VOCAB, continuation

if TYPE_CHECKING:
    from server.extensions.chaos.split.engine import SplitEngine

KINDS = ("split", "prefix", "plain")


@dataclass(slots=True, eq=False)
class SplitJob:
    """A job.  kind: how its pages move.  request: its number in the log, another one after the router has died.

    got: its output so far.  at: the engine that works for it, with the request's id there."""

    number: int
    kind: str
    prompt: list[int]
    expected: list[int]
    request: int
    got: list[int] = field(default_factory=list)
    at: "tuple[SplitEngine, int] | None" = None
    leg: str = ""
    prefiller: str = ""
    attempt: int = 0
    ended: str = ""

    @classmethod
    def draw(cls, seed: int, number: int) -> "SplitJob":
        """Return the numbered job of a seed."""
        dice = partial(luck, seed, 0x10B, number)
        kind = KINDS[0] if dice(1) < 0.7 else KINDS[1 + (dice(2) < 0.3)]
        shared = int(dice(3) * 3)  # some prompts begin alike
        begin = [int(luck(seed, shared, at) * VOCAB) for at in range(int(dice(4) * 60))]
        prompt = begin + [int(dice(5, at) * VOCAB) for at in range(1 + int(dice(6) * 160))]
        num_output = 1 + int(dice(7) * 16)
        return cls(number, kind, prompt, continuation(np.array(prompt, dtype=np.int32), num_output), number)
