"""The conformance kit for policies of snapshots: one call checks a policy, and lists every case that fails.

    from engine.plugins.snapshots.kit import check_snapshot_policy
    check_snapshot_policy(EndsAndBranches)

Owns: random prompts.  Does not know: the quality of a choice.
"""

from collections.abc import Callable

import numpy as np

from engine.plugins.proof.findings import Findings
from engine.plugins.snapshots.policy import PromptPages, SnapshotPolicy
from engine.plugins.testing.promises import at_once, watch_memory

NUM_PROMPTS = 300
MOST_PAGES = 5000


def check_snapshot_policy(make: Callable[[], SnapshotPolicy]) -> None:
    """Ask for the places of random prompts.  Raises ConformanceError with all that fails.

    make: builds a new one each time, as the plugin's hook does."""
    findings = Findings("policy of snapshots")
    with findings.case("attributes"):
        policy = make()
        assert isinstance(policy, SnapshotPolicy), f"{policy!r} lacks a part of SnapshotPolicy"
        for name in ("keeps_turns", "keeps_branches"):
            value = getattr(policy, name)
            assert isinstance(value, bool), f"{name} is {value!r}, expected a bool"
    findings.timed("places", lambda: _check_places(make))
    findings.timed("memory", lambda: _check_memory(make()))
    findings.conclude()


def _check_places(make: Callable[[], SnapshotPolicy]) -> None:
    first, second = make(), make()
    of_prompt = at_once(first.of_prompt, "of_prompt")
    for found in _prompts():
        places = of_prompt(found)
        is_list = isinstance(places, list) and all(type(one) is int for one in places)
        assert is_list, f"of_prompt({found}) is {places!r:.200}, not a list of numbers of pages"
        again = second.of_prompt(found)
        assert places == again, f"of_prompt({found}) is {places!r:.200}, and {again!r:.200} of another such policy"


def _check_memory(policy: SnapshotPolicy) -> None:
    prompts = _prompts()
    watch_memory(lambda number: policy.of_prompt(prompts[number % NUM_PROMPTS]), "of_prompt")


def _prompts() -> list[PromptPages]:
    dice, prompts = np.random.default_rng(0), []
    for _ in range(NUM_PROMPTS):
        most, found = int(dice.integers(0, MOST_PAGES)), []
        for _ in range(3):
            found.append(most)
            most = int(dice.integers(0, most + 1))
        pages, cached, state = found
        own = pages if dice.random() < 0.5 else int(dice.integers(0, pages + 1))
        prompts.append(PromptPages(num_pages=pages, num_of_prompt=own, num_cached=cached, num_with_state=state))
    return prompts
