"""The plan of a run of split engines: sizes, the weather between them, and a list of operations.

Owns: what a seed draws.  Does not know: how it is carried out (``world.py``).
"""

from dataclasses import dataclass
from functools import partial

from server.extensions.chaos.sim.luck import luck

MAX_LEN = 512
PREFILLERS, DECODERS = ("p0", "p1"), ("d0", "d1")
WEATHER = {"Loss": "loss", "Doubling": "doubling", "Damage": "damage"}  # a fault, and its share in the setup


@dataclass(frozen=True, slots=True)
class SplitSetup:
    """The engines and the network of a run.  calm: no fault, and room for all: then every page must be handed over."""

    seed: int
    calm: bool
    page_size: int
    num_pages: int
    num_ranks: int
    num_rows: int
    lent_share: float
    overlap: int
    num_jobs: int
    lease_s: float
    timeout_s: float
    loss: float
    doubling: float
    damage: float
    delay_s: float
    num_deaths: int
    num_drains: int
    num_cancels: int
    slow: bool
    num_snapshots: int

    @classmethod
    def draw(cls, seed: int) -> "SplitSetup":
        """Return the setup of a seed."""
        dice = partial(luck, seed)
        calm = dice(1) < 0.15
        page_size = (4, 8, 16)[int(dice(2) * 3)]
        rough = 0.0 if calm else dice(3)
        return cls(
            seed=seed,
            calm=calm,
            page_size=page_size,
            num_pages=(2048 if calm or dice(5) < 0.25 else 260 + int(dice(4) * 500)) // page_size,
            num_ranks=1 + (dice(6) < 0.4),
            num_rows=6 if calm else 2 + int(dice(19) * 5),
            lent_share=0.5 if calm else 0.3 + 0.7 * dice(20),
            overlap=1 + (dice(7) < 0.5),
            num_jobs=3 + int(dice(8) * 7),
            lease_s=2.0 if calm else 0.2 + dice(9) * 4,
            timeout_s=0.5 + dice(10) * 3,
            loss=0.4 * rough * (dice(11) < 0.6),
            doubling=0.3 * rough * (dice(12) < 0.6),
            damage=0.2 * rough * (dice(13) < 0.4),
            delay_s=0.001 if calm else 0.05 * dice(14) ** 2,
            num_deaths=0 if calm else int(dice(15) * 5),
            num_drains=0 if calm else int(dice(16) * 3),
            num_cancels=0 if calm else int(dice(17) * 3),
            slow=not calm and dice(18) < 0.2,
            num_snapshots=0 if dice(21) < 0.6 else 64 if calm else 7 + int(dice(22) * 8),
        )


@dataclass(frozen=True, slots=True)
class SplitOp:
    """Something that happens.  kind: Ask, Leave, or a fault.  target: the engine, '' for none.  job: its number."""

    at: float
    kind: str
    target: str = ""
    job: int = -1

    def __str__(self) -> str:
        return f"at {self.at:.2f} s: {self.kind} {self.target or (self.job if self.job >= 0 else '')}".rstrip()


def draw_ops(setup: SplitSetup) -> dict[int, SplitOp]:
    """Return the operations of a setup, by number, in order of time."""
    seed, dice = setup.seed, partial(luck, setup.seed, 0xFA)
    ops = [SplitOp(1.5 * luck(seed, 0x10B, job, 8), "Ask", job=job) for job in range(setup.num_jobs)]
    ops += [SplitOp(0.0, kind) for kind, share in WEATHER.items() if getattr(setup, share)]
    for number in range(setup.num_deaths):
        kind, name = dice(2, number), (*PREFILLERS, *DECODERS)[int(dice(3, number) * 4)]
        fault = "Kill" if kind < 0.5 else "Lose" if kind < 0.8 else "Router"
        ops.append(SplitOp(dice(1, number) * 2.5, fault, "" if fault == "Router" else name))
    for number in range(setup.num_drains):
        ops.append(SplitOp(dice(4, number) * 2.5, "Drain", DECODERS[int(dice(5, number) * 2)]))
    for number in range(setup.num_cancels):
        ops.append(SplitOp(dice(7, number) * 2.0, "Leave", job=int(dice(6, number) * setup.num_jobs)))
    if setup.slow:
        ops.append(SplitOp(dice(8) * 1.5, "SlowLink"))
    order = sorted(range(len(ops)), key=lambda number: ops[number].at)
    return {number: ops[number] for number in order}
