"""The share of prompts of a model with recurrent states that is cached, by the policy of snapshots.

Sessions of several turns go through the engine's planner in virtual time, to a pool with room for about half of them.
Each policy is compared with an oracle, which takes snapshots at the places from which a later prompt will go on, and
nowhere else, and with a cache that has a state behind every page, which is a cache without states.
Needs no GPU and no torch; two minutes.

    python benchmarks/bench_states.py
    python benchmarks/bench_states.py --pages-per-slot 256 --output results.json
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table
from simulation import EOS, PAGE_SIZE, Request, Simulation, tokens

from engine.features.states.planner import StatesPlanner
from engine.features.states.slots import PAGES_PER_SLOT
from engine.kv.node import Handle
from engine.kv.pages import Pages
from engine.messages import Admission
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.plugins.snapshots.policy import PromptPages, SnapshotPolicy
from engine.scheduling.feature import NewFeature, PlannerParts
from engine.scheduling.rows import Sequence as Row

MAX_RUNNING = 64
POLICIES: dict[str, SnapshotPolicy] = {
    "default": EndsAndBranches(),
    "no branches": EndsAndBranches(keeps_branches=False),
    "prompts": EndsAndBranches(keeps_turns=False, keeps_branches=False),
    "turns": EndsAndBranches(keeps_prompts=False, keeps_branches=False),
    "branches": EndsAndBranches(keeps_prompts=False, keeps_turns=False),
    "every 16 pages": EndsAndBranches(False, False, False, every=16),
    "every 4 pages": EndsAndBranches(False, False, False, every=4),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session, and the tokens of its output, with the EOS."""

    at: float
    prompt: np.ndarray
    output: np.ndarray

    @property
    def all_tokens(self) -> np.ndarray:
        """Prompt and output."""
        return np.concatenate((self.prompt, self.output))


Load = Callable[[np.random.Generator, int], list[Turn]]


def _answer(rng: np.random.Generator, low: int, high: int) -> np.ndarray:
    return np.append(tokens(rng, int(rng.integers(low, high))), np.int32(EOS))


def chats(rng: np.random.Generator, count: int, thoughts: int = 0) -> list[Turn]:
    """Conversations after one of three system prompts.  thoughts: the most tokens that the next prompt leaves out."""
    systems, turns = [tokens(rng, 300) for _ in range(3)], []
    for _ in range(count // 5):
        at, prompt = float(rng.uniform(0, count)), systems[rng.integers(3)]
        for _ in range(rng.integers(2, 9)):
            prompt = np.concatenate((prompt, tokens(rng, int(rng.integers(20, 150)))))
            thought = tokens(rng, int(rng.integers(thoughts // 2, thoughts))) if thoughts else tokens(rng, 0)
            answer = _answer(rng, 50, 300)
            turns.append(Turn(at, prompt, np.concatenate((thought, answer))))
            prompt, at = np.concatenate((prompt, answer)), at + float(rng.uniform(10, 40))
    return turns


def agents(rng: np.random.Generator, count: int) -> list[Turn]:
    """Agents with the same tools, which get long results; one in four tries a turn three times from the same point."""
    tools, turns = tokens(rng, 1500), []
    for _ in range(count // 10):
        at, prompt = float(rng.uniform(0, count)), np.concatenate((tools, tokens(rng, 200)))
        for _ in range(rng.integers(5, 14)):
            prompt = np.concatenate((prompt, tokens(rng, int(rng.integers(50, 600)))))
            tries = [_answer(rng, 20, 80) for _ in range(3 if rng.random() < 0.25 else 1)]
            turns += [Turn(at + 0.5 * number, prompt, one) for number, one in enumerate(tries)]
            prompt, at = np.concatenate((prompt, tries[-1])), at + float(rng.uniform(2, 8))
            if len(prompt) > 3800:
                break
    return turns


def documents(rng: np.random.Generator, count: int) -> list[Turn]:
    """Questions about forty documents, of which some are popular."""
    known = [tokens(rng, int(rng.integers(600, 3000))) for _ in range(40)]
    shares = 1 / np.arange(1, len(known) + 1) ** 0.9
    chosen = rng.choice(len(known), count, p=shares / shares.sum()).tolist()
    times = np.sort(rng.uniform(0, count, count)).tolist()
    return [
        Turn(at, np.concatenate((known[number], tokens(rng, int(rng.integers(20, 80))))), _answer(rng, 20, 100))
        for at, number in zip(times, chosen, strict=True)
    ]


LOADS: dict[str, Load] = {
    "chats": chats,
    "chats with thoughts": partial(chats, thoughts=400),
    "agents": agents,
    "documents": documents,
}


class StateSimulation(Simulation):
    """A simulation of these turns, whose number is their seed."""

    def __init__(self, turns: Sequence[Turn], num_pages: int, features: Sequence[NewFeature]) -> None:
        self._turns = turns
        requests = [Request(one.at, one.prompt, len(one.output), len(one.output) + 1) for one in turns]
        super().__init__(requests, num_pages=num_pages, max_running=MAX_RUNNING, max_len=8192, features=features)

    def _script(self, admission: Admission) -> np.ndarray:
        return self._turns[admission.params.seed or 0].all_tokens[:-1]


class Oracle:
    """Snapshots at the ends of turns, and where a later prompt will go on.  wanted: of each turn, in pages.

    turn: the one whose row starts."""

    keeps_turns = keeps_branches = True

    def __init__(self, wanted: Sequence[set[int]]) -> None:
        self._wanted = wanted
        self.turn = 0

    def of_prompt(self, found: PromptPages) -> set[int]:
        """Return the places of the turn."""
        return self._wanted[self.turn]


class OraclePlanner(StatesPlanner):
    """States by an oracle, which needs to know whose they are."""

    def __init__(self, parts: PlannerParts, *, policy: Oracle, num_slots: int) -> None:
        super().__init__(parts, policy=policy, num_slots=num_slots)
        self._oracle = policy

    def adopt(self, sequence: Row, handle: Handle, key: bytes, pages: Pages) -> None:
        super().adopt(sequence, handle, key, pages)
        self._oracle.turn = sequence.params.seed or 0


def goes_on(turns: Sequence[Turn]) -> list[set[int]]:
    """Return, of each turn, the numbers of pages after which a later prompt goes on, by the latest that it may use."""
    wanted: list[set[int]] = [set() for _ in turns]
    first_page: dict[bytes, list[int]] = {}
    for number, turn in enumerate(turns):
        group = first_page.setdefault(turn.prompt[:PAGE_SIZE].tobytes(), [])
        ends = [(_common(turn.prompt[:-1], turns[other].all_tokens[:-1]) // PAGE_SIZE, other) for other in group]
        if ends:
            pages, other = max(ends)
            wanted[other].add(pages)
        group.append(number)
    return wanted


def _common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def run(turns: Sequence[Turn], num_pages: int, features: Sequence[NewFeature]) -> dict[str, float]:
    """The figures of a policy."""
    simulation = StateSimulation(turns, num_pages, features)
    outcome = simulation.run()
    total = sum(len(turn.prompt) for turn in turns)
    return {
        "hit_rate": float(outcome.cached.sum()) / total,
        "ttft_p50_ms": simulation.ttft_ms(50),
        "ttft_p95_ms": simulation.ttft_ms(95),
    }


def measure(num_turns: int, pages_per_slot: int, room: float) -> list[dict[str, Any]]:
    """A row for each load and policy."""
    rows: list[dict[str, Any]] = []
    for load, draw in LOADS.items():
        turns = sorted(draw(np.random.default_rng(0), num_turns), key=lambda turn: turn.at)
        longest_s = max(turn.at for turn in turns)
        tokens_at_once = sum(len(turn.output) for turn in turns) + sum(
            len(turn.prompt) for turn in turns if turn.at > longest_s / 2
        )
        num_pages = max(1024, int(room * tokens_at_once / PAGE_SIZE / 4))
        num_slots = MAX_RUNNING + num_pages // pages_per_slot
        oracle = partial(OraclePlanner, policy=Oracle(goes_on(turns)), num_slots=num_slots)
        choices: dict[str, Sequence[NewFeature]] = {
            name: [partial(StatesPlanner, policy=policy, num_slots=num_slots)] for name, policy in POLICIES.items()
        }
        for name, features in {**choices, "oracle": [oracle], "a state behind every page": []}.items():
            figures = run(turns, num_pages, features)
            rows.append({"load": load, "policy": name, "num_pages": num_pages, "num_slots": num_slots, **figures})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """A table for each load."""
    for load in LOADS:
        mine = [row for row in rows if row["load"] == load]
        sizes = f"{mine[0]['num_pages']:,} pages, {mine[0]['num_slots']} snapshots"
        table = Table("snapshots", "of the prompts cached", "first token p50", "p95", title=f"{load}: {sizes}")
        for row in mine:
            times = (f"{row[name]:,.0f} ms" for name in ("ttft_p50_ms", "ttft_p95_ms"))
            table.add_row(row["policy"], f"{row['hit_rate']:.1%}", *times)
        Console().print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--turns", type=int, default=1000, help="about so many requests (default: 1000)")
    parser.add_argument("--pages-per-slot", type=int, default=PAGES_PER_SLOT, help="pages for each slot of a snapshot")
    parser.add_argument("--room", type=float, default=0.5, help="share of the sessions that the pool has room for")
    arguments = parser.parse_args()
    rows = measure(arguments.turns, arguments.pages_per_slot, arguments.room)
    show(rows)
    keep(arguments.output, {"turns": arguments.turns, "pages_per_slot": arguments.pages_per_slot, "rows": rows})


if __name__ == "__main__":
    main()
