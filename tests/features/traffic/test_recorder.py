"""Recording: what passed the scheduler is in the trace, no text is, the disk's bound is kept, failures harm nobody."""

import asyncio
import base64
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import Config, build_config
from engine.control.changeover import Changeover
from engine.features.traffic.recorder import TraceRecorder
from engine.features.traffic.trace import DIGEST_BYTES, chained, read_trace
from engine.messages import Admit, Failed, Finish, Step, StepDone, Tokens
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import ConfigError
from engine.types.notices import ExecutorsLost
from engine.types.params import SamplingParams
from tests.features.traffic.recorded import limits_of, lines, record, recorder_in, requests
from tests.pace import far
from tests.server.live_system import LiveSystem
from tests.small_disk import SmallDisk

DEMO = Path(__file__).parents[3] / "examples" / "demo_model"
LIMITS = PlannerLimits(4, 64, 32, 16, 100, 512, (2,))


def test_every_request_and_every_step_is_recorded_as_it_was(tmp_path: Path) -> None:
    made = requests(120, 20.0)
    trace, engine = record(tmp_path, made)
    assert trace.head.limits == limits_of(engine)
    assert len(trace.requests) == len(engine.finished) == 120
    by_time = sorted(engine.finished, key=lambda one: one.arrived_at)
    for request, line, metrics in zip(made, trace.requests, by_time, strict=True):
        assert line.at == pytest.approx(metrics.arrived_at, abs=1e-6)
        assert (line.prompt, line.output) == (len(request.prompt), metrics.num_output_tokens)
        assert (line.max_tokens, line.tenant) == (request.max_tokens, request.tenant)
        assert line.finish == ("length" if request.output > request.max_tokens else "stop")
        assert (line.cached, line.retractions) == (metrics.cached_tokens, metrics.num_retractions)
        assert (line.ttft_s, line.e2e_s) == (
            pytest.approx(metrics.ttft_s, abs=1e-6),
            pytest.approx(metrics.e2e_s, abs=1e-6),
        )
    assert len(trace.steps) == engine.planner.meter.num_steps
    recent = engine.planner.meter.recent_steps
    for step, seen in zip(trace.steps[-len(recent) :], recent, strict=True):
        assert (step.decodes, step.prefills, step.prefill_tokens) == (
            seen.num_decodes, seen.num_prefills, seen.num_prefill_tokens,
        )  # fmt: skip
        assert (step.at, step.seconds) == (
            pytest.approx(seen.began_at, abs=2e-6),
            pytest.approx(seen.completed_at - seen.began_at, abs=2e-6),
        )


def test_the_context_of_a_step_is_what_its_rows_read(tmp_path: Path) -> None:
    """One request alone: a prompt of 40 in one step, then each decode reads one token more than the one before."""
    made = requests(1, 1.0)
    length, output = len(made[0].prompt), min(made[0].output, made[0].max_tokens)
    trace, _ = record(tmp_path, made)
    first, *decodes = trace.steps
    assert (first.prefill_tokens, first.pairs) == (length, length * (length + 1) // 2)
    assert [one.context for one in decodes[: output - 1]] == [length + 1 + number for number in range(output - 1)]


def common(first: bytes, second: bytes, width: int) -> int:
    """How many items two sequences begin with in common."""
    count = 0
    most = min(len(first), len(second)) // width
    while count < most and first[count * width : (count + 1) * width] == second[count * width : (count + 1) * width]:
        count += 1
    return count


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.sampled_from([1, 4]),
)
def test_blocks_are_equal_as_far_as_the_tokens_before_their_ends_are(first: list[int], second: list[int], block: int):
    tokens = [np.array(one, dtype=np.int32).tobytes() for one in (first, second)]
    found = [chained(one, block, b"key", "") for one in tokens]
    assert [len(one) // DIGEST_BYTES for one in found] == [len(first) // block, len(second) // block]
    assert common(*found, DIGEST_BYTES) == common(*tokens, 4 * block)
    others = chained(tokens[0], block, b"key", "salted")
    assert common(found[0], others, DIGEST_BYTES) == 0
    assert common(found[0], chained(tokens[0], block, b"other key", ""), DIGEST_BYTES) == 0


def test_a_trace_has_no_token_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    """Not even as a hash that somebody without the key could make of a guessed text."""
    made = requests(3, 20.0)
    record(tmp_path, made)
    (path,) = (tmp_path / "traces").iterdir()
    text = path.read_bytes()
    for one in made:
        assert one.prompt[:8].tobytes() not in base64.b64decode(lines(path)[-1].get("blocks", "")) + text
        unkeyed = chained(one.prompt.tobytes(), 16, b"", " ")
        assert base64.b64encode(unkeyed[:DIGEST_BYTES]) not in text
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[TraceRecorder]:
    made, _ = recorder_in(tmp_path, time.monotonic, trace_mb=1)
    yield made
    made.close()


class Sink:
    """A link that keeps what is put."""

    def __init__(self) -> None:
        self.got: list[object] = []

    def put(self, message: object) -> None:
        self.got.append(message)


def admit(request_id: int, num_tokens: int = 40) -> Admit:
    return Admit(
        request_id=request_id, token_ids=np.arange(num_tokens, dtype=np.int32).tobytes(), params=SamplingParams()
    )


def metrics(request_id: int, finish: Finish = Finish.STOP, output: int = 1) -> RequestMetrics:
    return RequestMetrics(request_id, finish, 40, output, 0, 0, 1.0, 0.1, 0.2, None, 0.3)


def written(recorder: TraceRecorder, *messages: object) -> list[dict[str, object]]:
    """The lines of a trace in which these were put."""
    recorder.begin(LIMITS, Config())
    sink = Sink()
    link = recorder.tap(sink)
    for message in messages:
        if isinstance(message, RequestMetrics):
            recorder.callboard_request_finished((message,))
        else:
            link.put(message)
    assert sink.got == [one for one in messages if not isinstance(one, RequestMetrics)]
    recorder.close()
    return lines(recorder.path)


def test_a_request_that_failed_is_left_out(recorder: TraceRecorder) -> None:
    found = written(
        recorder,
        *(admit(1), admit(2), admit(3)),
        *(Failed(request_id=1, message="no"), metrics(1, Finish.ERROR), metrics(2), metrics(3, Finish.ERROR)),
    )
    assert [one["line"] for one in found] == ["head", "request"]


def test_steps_that_were_lost_are_not_taken_for_those_after_them(recorder: TraceRecorder) -> None:
    long, short = (
        Step(
            step_id=number, prefill_rows=row, prefill_starts=bytes(4), prefill_lengths=length, prefill_samples=bytes(4)
        )
        for number, row, length in ((0, bytes(4), b"\x20\0\0\0"), (1, bytes(4), b"\x05\0\0\0"))
    )
    done = [StepDone(rank=rank, step_id=1, token_ids=b"") for rank in (0, 1)]
    found = written(recorder, long, ExecutorsLost(reason="gone"), short, long, *done)  # the last one still runs
    (steps,) = (one["steps"] for one in found if one["line"] == "steps")
    assert isinstance(steps, list)
    assert [one[5] for one in steps] == [5], "one step of five tokens, told once however many ranks there are"


def test_outputs_are_put_together_from_the_tokens_of_many_steps(recorder: TraceRecorder) -> None:
    ids = np.array([1, 2], dtype=np.int64).tobytes()
    rounds = [
        Tokens(request_ids=ids, token_ids=np.array([10 + n, 20 + n], dtype=np.int32).tobytes(), finishes=bytes(2))
        for n in range(30)
    ]
    end = Tokens(
        request_ids=np.array([1], dtype=np.int64).tobytes(),
        token_ids=np.array([-1], dtype=np.int32).tobytes(),
        finishes=b"\x03",
    )
    found = written(recorder, admit(1), admit(2), *rounds, end, metrics(1, Finish.ABORT, 30), metrics(2, output=30))
    one, other = (base64.b64decode(str(line["blocks"])) for line in found if line["line"] == "request")
    prompt = np.arange(40, dtype=np.int32)
    expected = [np.concatenate((prompt, np.arange(start, start + 30, dtype=np.int32))) for start in (10, 20)]
    shared = [chained(tokens.astype(np.int32).tobytes(), 16, recorder._key, " ") for tokens in expected]
    assert [one, other] == shared


def test_no_more_disk_is_taken_than_was_said_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.features.traffic.recorder.EVERY_S", 0.02)
    other = tmp_path / "traces" / "another_model-2026.jsonl"
    other.parent.mkdir()
    other.write_bytes(bytes(1 << 20))
    recorder, _ = recorder_in(tmp_path, time.monotonic, trace_mb=1)
    recorder.begin(LIMITS, Config())
    link = recorder.tap(Sink())
    deadline = time.monotonic() + far(60)
    for number in range(1, 1200):
        link.put(admit(number, 6_000))  # a line of 3 kB
        recorder.callboard_request_finished((replace(metrics(number), num_prompt_tokens=6_000),))
        while len(recorder._notes) > 40:  # not faster than is written, as two batches would be one
            assert time.monotonic() < deadline
            time.sleep(0.01)
    recorder.close()
    found = sorted((tmp_path / "traces").glob("tested_model-*.jsonl"), key=lambda one: one.stat().st_mtime)
    assert 1 <= len(found) <= 6
    assert sum(one.stat().st_size for one in found) < 2 << 20
    assert recorder.path in found
    assert {one["line"] for path in found for one in lines(path)[:1]} == {"head"}
    assert other.exists(), "of another model"


@pytest.mark.parametrize("room", [0, 3, 700], ids=lambda room: f"{room} bytes left")
def test_a_full_disk_loses_what_it_does_not_take_and_a_trace_begins_when_there_is_room(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    for name, value in {"EVERY_S": 0.01, "TRY_AGAIN_S": 0.05}.items():
        monkeypatch.setattr(f"engine.features.traffic.recorder.{name}", value)
    disk = SmallDisk(monkeypatch)
    sink = Sink()
    link = recorder.tap(sink)
    asked = 0

    def until(holds: Callable[[], bool]) -> None:
        nonlocal asked
        deadline = time.monotonic() + far(10)
        while not holds():
            assert time.monotonic() < deadline
            asked += 1
            link.put(admit(asked))
            recorder.callboard_request_finished((metrics(asked),))
            time.sleep(0.01)

    def files() -> list[Path]:
        return sorted((recorder.path.parent).glob("*.jsonl"))

    recorder.begin(LIMITS, Config())
    until(lambda: not recorder._files._is_empty)
    disk.room = room
    until(lambda: "not recorded: [Errno 28] No space left on device" in caplog.text)
    failed_at = asked
    until(lambda: asked > failed_at + 20)
    assert caplog.text.count("not recorded") == 1
    until(lambda: len(files()) == 1)  # another one is there while its beginning is tried
    (before,) = files()
    disk.room = 1 << 20
    until(lambda: recorder.path != before and not recorder._files._is_empty)
    recorder.close()
    assert len(sink.got) == asked
    assert files() == [before, recorder.path]
    for path in files():
        assert [one["line"] for one in lines(path)][:2] == ["head", "request"]
        assert path.read_bytes().endswith(b"\n"), "whole lines alone"


def test_what_cannot_be_recorded_ends_the_recording_alone(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.begin(LIMITS, Config())
    sink = Sink()
    link = recorder.tap(sink)

    def broken(*_: object) -> None:
        raise ValueError("no such line")

    monkeypatch.setattr(recorder._files, "write", broken)
    link.put(admit(1))
    recorder.callboard_request_finished((metrics(1),))
    deadline = time.monotonic() + far(10)
    while not (recorder._ending.is_set() and "no such line" in caplog.text):  # logged after it is set
        assert time.monotonic() < deadline
        time.sleep(0.01)
    link.put(admit(2))
    assert len(sink.got) == 2
    assert not recorder._notes, "nothing is kept that is never written"


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"storage\.folder: .*file"):
        recorder_in(tmp_path / "file", time.monotonic)


def test_traces_need_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"storage\.trace_mb=5: traces need storage\.folder"):
        build_config(Config(), {"storage": {"trace_mb": 5}})


def test_a_real_engine_is_recorded(tmp_path: Path) -> None:
    """The demo model behind HTTP: what clients were told is what the trace has."""
    tables = {
        "model": {"path": str(DEMO)}, "kv": {"num_pages": 200}, "storage": {"folder": str(tmp_path), "trace_mb": 1},
    }  # fmt: skip
    prompts = [[3 + number] * 32 + [7] * (20 + number) for number in (0, 0, 1)]
    with LiveSystem(build_config(Config(), tables)) as live:
        usages = [live.complete(prompt, max_tokens=5 + n).json["usage"] for n, prompt in enumerate(prompts)]
    (path,) = (tmp_path / "traces").iterdir()
    trace = read_trace(path)
    assert [(one.prompt, one.output) for one in trace.requests] == [
        (one["prompt_tokens"], one["completion_tokens"]) for one in usages
    ]
    assert [one.cached for one in trace.requests] == [0, 48, 0]
    first, second, third = (one.blocks for one in trace.requests)
    assert common(first, second, DIGEST_BYTES) >= 3
    assert common(first, third, DIGEST_BYTES) == 0
    assert sum(one.prefill_tokens for one in trace.steps) == sum(map(len, prompts)) - 48
    assert all(one.ttft_s is not None and one.client == "127.0.0.1" for one in trace.requests)
    assert trace.head.limits.num_pages == 200
    assert os.path.samefile(path.parent.parent, tmp_path)


def test_a_trace_begins_anew_when_settings_change_while_requests_run(tmp_path: Path) -> None:
    """A prediction is for one planner's settings; what a change of them has no request of is no trace."""
    tables: dict[str, Any] = {
        "model": {"path": str(DEMO)}, "kv": {"num_pages": 200}, "storage": {"folder": str(tmp_path), "trace_mb": 1},
    }  # fmt: skip
    before = build_config(Config(), tables)
    with LiveSystem(before) as live:
        changeover = Changeover(live.system)

        def apply(**scheduler: Any) -> None:
            config = build_config(before, {"scheduler": scheduler})
            asyncio.run_coroutine_threadsafe(changeover.apply(config), live._loop).result(far(60))

        live.complete([5] * 40, max_tokens=3)
        apply(itl_target_ms=50.0)
        apply(itl_target_ms=60.0)
        live.complete([6] * 40, max_tokens=3)
        apply(itl_target_ms=60.0, max_running=3)
        live.complete([7] * 40, max_tokens=4)
    paths = sorted((tmp_path / "traces").iterdir(), key=lambda one: one.stat().st_mtime)
    traces = [read_trace(path) for path in paths]
    assert [trace.head.limits.itl_target_s for trace in traces] == [0.0, 0.06, 0.06]
    assert [trace.head.limits.max_running for trace in traces] == [64, 64, 3]
    assert [[one.output for one in trace.requests] for trace in traces] == [[3], [3], [4]]
    assert [trace.head.settings["scheduler"]["max_running"] for trace in traces][2] == 3
