"""Whatever has happened to a scheduler, a recording of it plans the same again, in another process too."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.features.recording.file import read_recording
from engine.features.recording.replay import Replay
from engine.messages import Admit, StepDone
from server.extensions.chaos.sim.dice import draw
from tests.features.recording.driver import SECRET, Driver
from tests.features.recording.runs import recorded_run, strange_plugins

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SEEDS = (1, 5, 7, 8, 9)
HAPPENED = {
    "NaN", "abort in flight", "adapter replaced", "duplicates rewritten", "eviction", "executors lost",
    "executors replaced", "loss explained", "masks late", "pages back from host", "pages from the store",
    "pages to host", "proposals accepted", "retraction", "tokens drafted",
}  # fmt: skip


@pytest.mark.parametrize("limit_bytes", [1 << 30, 10_000], ids=["whole", "ring"])
def test_simulated_runs_with_faults_of_every_kind_plan_the_same_again(tmp_path: Path, limit_bytes: int) -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        with strange_plugins():
            run = recorded_run(draw(seed), tmp_path, limit_bytes=limit_bytes)
            recording = run.recording()
            replay = Replay(recording)
            turns = list(replay)
        assert bool(recording.state) == (limit_bytes == 10_000), "the ring has wrapped around, or not"
        assert not replay.fault
        assert [turn.differs for turn in turns if turn.differs is not None] == []
        assert replay.digest == replay.recorded_digest
        assert replay.num_plans
        seen |= run.world.marks.keys()
    assert seen >= HAPPENED


def test_a_minute_with_faults_replays_to_the_same_digest_in_another_process(tmp_path: Path) -> None:
    driver = Driver(tmp_path, limit_bytes=400_000)
    driver.recorder.alert = lambda why: None  # type: ignore[method-assign]
    driver.run(80, losses=4)
    planner = driver.scheduler.planner
    assert planner is not None
    assert planner.meter.num_retractions > 2
    assert planner.meter.accepted_at
    assert planner.features.gauges()["host_pages_used"]
    driver.recorder.write("test")
    (path,) = driver.written()
    recording = read_recording(path)
    times = [np.frombuffer(turn.readings)[0] for turn in recording.turns if turn.readings]
    assert recording.state
    assert times[-1] - times[0] > 60
    replay = Replay(recording)
    list(replay)
    assert replay.digest == replay.recorded_digest
    done = subprocess.run(
        [sys.executable, "-m", "callboard", "replay", str(path), "--quiet"],
        env={**os.environ, "PYTHONHASHSEED": "1"}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert replay.recorded_digest in done.stdout.splitlines()[-1]


def test_a_replay_needs_neither_torch_nor_weights(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.run(1)
    driver.recorder.write("test")
    (path,) = driver.written()
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from server.cli import main\n"
        f"main(['replay', {str(path)!r}, '--last', '3'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SHA-256" in done.stdout


def test_hashed_prompts_say_nothing_of_text_and_plan_the_same(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.run(5)
    driver.recorder.write("test")
    (path,) = driver.written()
    recording = read_recording(path)
    messages = [message for turn in recording.turns for message in turn.messages]
    admitted = {one.request_id: one for one in messages if isinstance(one, Admit)}
    assert len(admitted) == len(driver.prompts)
    told = [np.frombuffer(admitted[number].token_ids, dtype=np.int32) for number in sorted(admitted)]
    for prompt, other in zip(driver.prompts, told, strict=True):
        assert len(prompt) == len(other)
        assert (prompt == other).mean() < 0.5
        # Equal where they were equal, and nowhere else: one token stands for one token.
        assert len(set(zip(prompt.tolist(), other.tolist(), strict=True))) == len(set(prompt.tolist()))
    assert SECRET not in str(messages)
    assert "a text" not in str(messages)
    assert any(one.cache_salt for one in admitted.values())
    sampled = {token for one in messages if isinstance(one, StepDone) for token in np.frombuffer(one.token_ids, "i4")}
    assert len(sampled - {10, 11, 12}) >= 2
    replay = Replay(recording)
    list(replay)
    assert replay.digest == replay.recorded_digest


def test_no_key_gets_into_a_file(tmp_path: Path) -> None:
    driver = Driver(tmp_path, prompts="whole")
    driver.run(1)
    driver.recorder.write("test")
    (path,) = driver.written()
    assert SECRET not in str(read_recording(path).header)


def spans(plan: str) -> list[tuple[int, int]]:
    """The parts of prompts that a plan has."""
    return [(int(start), int(end)) for start, end in re.findall(r"computes (\d+):(\d+)", plan)]


def test_a_difference_is_named_by_its_turn(tmp_path: Path) -> None:
    driver = Driver(tmp_path, prompts="whole")
    driver.run(2)
    driver.recorder.write("test")
    (path,) = driver.written()
    recording = read_recording(path)
    limits = replace(recording.header.blueprint.limits, max_step_tokens=20)
    blueprint = msgspec.structs.replace(recording.header.blueprint, limits=limits)
    other = replace(recording, header=msgspec.structs.replace(recording.header, blueprint=blueprint))
    replay = Replay(other)
    first = next(turn for turn in replay if turn.differs is not None)
    assert first.plans[first.differs or 0].startswith("step 0: ")
    assert sum(end - start for start, end in spans(first.plans[first.differs or 0])) <= 20


def test_reasons_name_requests_rows_and_pages(tmp_path: Path) -> None:
    driver = Driver(tmp_path, names={"eviction": "lru", "policy": "priority"})
    driver.run(20, losses=1)
    driver.recorder.write("test")
    path = driver.written()[-1]
    told = [reason for turn in Replay(read_recording(path)) for reason in turn.reasons]
    for words in ("starts in row", "and waits again", "cached pages evicted", "ends in row", "is first and waits"):
        assert any(words in reason for reason in told), words


@pytest.mark.parametrize("limit_bytes", [1 << 30, 30_000], ids=["whole", "ring"])
def test_changes_of_settings_are_part_of_a_recording(tmp_path: Path, limit_bytes: int) -> None:
    driver = Driver(tmp_path, limit_bytes=limit_bytes)
    driver.run(4)
    first = driver.blueprint
    limits = replace(first.limits, prefill_chunk=8, itl_target_s=0.05)
    tuned = msgspec.structs.replace(first, limits=limits, names={**first.names, "policy": "policy.lpm"})
    driver.change(tuned, renews=False)
    driver.run(4)
    names = {"eviction": "eviction.lfu", "policy": "policy.lpm"}
    driver.change(msgspec.structs.replace(first, names=names, overlap_depth=1), renews=True)
    driver.run(4)
    assert not driver.recorder._is_off
    driver.recorder.write("test")
    recording = read_recording(driver.written()[-1])
    assert bool(recording.state) == (limit_bytes == 30_000)
    replay = Replay(recording)
    list(replay)
    assert not replay.fault
    assert replay.digest == replay.recorded_digest


@pytest.mark.parametrize("limit_bytes", [1 << 30, 30_000], ids=["whole", "ring"])
def test_a_policy_that_goes_and_comes_back_before_anything_arrives_is_a_new_one(
    tmp_path: Path, limit_bytes: int
) -> None:
    driver = Driver(tmp_path, limit_bytes=limit_bytes, seed=3)
    driver.tell(driver.request())
    driver.run(6)
    fair = driver.blueprint
    driver.change(msgspec.structs.replace(fair, names={**fair.names, "policy": "policy.lpm"}), renews=False)
    driver.change(fair, renews=False)
    driver.run(8)
    assert not driver.recorder._is_off
    driver.recorder.write("test")
    replay = Replay(read_recording(driver.written()[-1]))
    list(replay)
    assert not replay.fault
    assert replay.digest == replay.recorded_digest
