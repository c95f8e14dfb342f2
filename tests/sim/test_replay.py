"""A seed is a run: whoever replays it sees the same messages at the same times."""

import os
import subprocess
import sys

import pytest

from server.extensions.chaos.sim.dice import draw
from tests.sim.run import REPOSITORY, main, play_seed, replay_line

SEEDS = (7, 63, 104)


def replayed(seed: int, hash_seed: str) -> str:
    """The last line of the replay line's output, in a fresh interpreter."""
    command = [sys.executable, *replay_line(seed).split()[1:], "--quiet"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_a_replay_is_the_same_run_whatever_the_order_of_sets(seed: int) -> None:
    outcome, _ = play_seed(seed)
    lines = {replayed(seed, hash_seed) for hash_seed in ("0", "1", "77")}
    assert len(lines) == 1
    assert f"digest {outcome.digest:08x}: passed" in lines.pop()


def test_what_ran_before_in_the_process_makes_no_difference() -> None:
    first, _ = play_seed(11)
    play_seed(12)
    again, _ = play_seed(11)
    assert again == first


def test_another_seed_or_another_order_is_another_run() -> None:
    digests = {play_seed(seed, order)[0].digest for seed in (21, 22) for order in (0, 1)}
    assert len(digests) == 4


def test_a_part_of_a_scenario_is_replayed_by_its_operations(capsys: pytest.CaptureFixture[str]) -> None:
    some = list(draw(63).ops)[::3]
    outcome, _ = play_seed(63, 2, some)
    assert main(replay_line(63, 2, some).split()[3:]) == 0
    shown = capsys.readouterr().out
    assert f"digest {outcome.digest:08x}: passed" in shown
    assert shown.count("op ") >= len(some)
