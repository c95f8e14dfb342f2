"""The plan of a run of streams that outlive their connection and their server.

Owns: what a seed draws.  Does not know: how it is carried out (``scene.py``).
"""

import random
from dataclasses import dataclass, field

from server.extensions.chaos.fleet.scenes import small_setup
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.scenario import SimSetup
from server.extensions.journal.journal import Fsync

REJOIN_S = 30.0
PATIENCE = {"Away": (0.1, 5.0), "Late": (40.0, 50.0), "Kill": (0.2, 3.0), "Power": (0.2, 3.0), "Full": (0.05, 0.6)}
# What often follows a fault: what came before it, or while it lasted, may not be on the disk.
NEXT = {"Kill": ("Power", 0.2, 1.6), "Full": ("Kill", 0.2, 0.8)}


@dataclass(frozen=True, slots=True)
class RejoinOp:
    """Something that happens.  kind: Ask, Leave, Away and Late of the client ``target``, or a fault of the server."""

    at: float
    kind: str
    target: int = -1
    seconds: float = 0.0
    prompt: tuple[int, ...] = ()
    max_tokens: int = 0

    def __str__(self) -> str:
        if self.kind == "Ask":
            return f"at {self.at:.2f} s: a request of {len(self.prompt)} tokens for {self.max_tokens}"
        target = f" {self.target}" if self.target >= 0 else ""
        return f"at {self.at:.2f} s: {self.kind}{target}" + (f" for {self.seconds:.2f} s" if self.seconds else "")


@dataclass
class RejoinPlan:
    """The run of a seed.  fsync: of the journal.  disk_s: mean time of a sync."""

    seed: int
    fsync: Fsync
    disk_s: float
    setup: SimSetup
    ops: dict[int, RejoinOp] = field(default_factory=dict)


def draw(seed: int) -> RejoinPlan:
    """Draw the run of a seed."""
    rng = random.Random(seed * 2 + 1)
    setup = small_setup(rng, seed)
    fsync: Fsync = rng.choice(("always", "always", "interval", "never"))
    disk_s = rng.choice((0.002, 0.05, 0.4, 0.4))
    ops: list[RejoinOp] = []
    at = 0.1
    for _ in range(rng.choice((3, 6, 12))):
        at += rng.expovariate(1.0) * rng.choice((0.02, 0.2, 0.6))
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 100)))
        ops.append(RejoinOp(at, "Ask", prompt=prompt, max_tokens=rng.randint(1, 60)))
        if rng.random() < 0.5:
            kind = rng.choice(("Away", "Away", "Away", "Late", "Leave"))
            seconds = rng.uniform(*PATIENCE[kind]) if kind in PATIENCE else 0.0
            ops.append(RejoinOp(at + rng.uniform(0, 1.0), kind, len(ops) - 1, seconds))
    asked = [op.at for op in ops if op.kind == "Ask"]
    for _ in range(rng.choice((0, 1, 2, 4))):
        kind = rng.choice(("Kill", "Kill", "Power", "Power", "Full"))
        about = rng.choice(asked)  # often just before a request, or soon behind one
        soon = about + rng.uniform(0, 0.4)
        just_before = about - 0.001
        when = just_before if kind == "Full" else rng.choice((rng.uniform(0.2, at + 1.0), just_before, soon, soon))
        ops.append(RejoinOp(max(0.0, when), kind, seconds=rng.uniform(*PATIENCE[kind])))
        if kind in NEXT and rng.random() < 0.7:
            ends_at = ops[-1].at + ops[-1].seconds
            follows, least_s, most_s = NEXT[kind]
            next_at = ends_at + rng.uniform(least_s, most_s)
            ops.append(RejoinOp(next_at, follows, seconds=rng.uniform(*PATIENCE[follows])))
    order = sorted(range(len(ops)), key=lambda number: ops[number].at)
    return RejoinPlan(seed, fsync, disk_s, setup, {number: ops[number] for number in order})
