"""``callboard bench``: loads are what they say, streams are measured right, failures are counted, results compare."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from engine.config import Config
from engine.settings.sections import ServerSection
from engine.types.params import SamplingParams
from server.cli import main
from server.extensions.bench import report
from server.extensions.bench.client import Record
from server.extensions.bench.loads import WORDS, LoadSizes, arrivals, draw, read_trace
from tests.server.fake_ingress import FakeIngress
from tests.server.live_server import MODEL, LiveServer


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# ---- loads ---------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process_of_the_rate_and_the_same_for_a_seed() -> None:
    times = np.array(arrivals(20_000, 5.0, 1, rng()))
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03), "gaps of a Poisson process are exponential"
    assert times.tolist() == arrivals(20_000, 5.0, 1, rng())


def test_bursts_come_together_and_at_the_same_rate() -> None:
    times = arrivals(10_003, 5.0, 10, rng())
    assert len(times) == 10_003
    assert [len(set(times[start : start + 10])) for start in (0, 10, 5000)] == [1, 1, 1]
    assert times[-1] == pytest.approx(10_003 / 5, rel=0.1)


def test_a_load_has_the_sizes_the_prefixes_and_the_turns_that_were_asked_for() -> None:
    load = draw(40, LoadSizes(prompt=20, output=8, variation=0.5, prefix=6, groups=3, turns=2), rng())
    texts = [[turn.text.split() for turn in one.turns] for one in load]
    assert {len(one) for one in texts} == {2}
    assert len({tuple(first[:6]) for first, _ in texts}) == 3
    lengths = [len(first) - 6 for first, _ in texts] + [len(second) for _, second in texts]
    assert 10 <= min(lengths) < 15 < 25 < max(lengths) <= 30
    assert {word for first, _ in texts for word in first} <= set(WORDS)
    assert all(4 <= turn.max_tokens <= 12 for one in load for turn in one.turns)
    assert load == draw(40, LoadSizes(prompt=20, output=8, variation=0.5, prefix=6, groups=3, turns=2), rng())


def test_a_trace_begins_with_its_first_line_and_is_sent_in_order(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(
        '{"time": 12.5, "max_tokens": 3, "prompt_tokens": 7}\n\n{"time": 10, "max_tokens": 4, "prompt": "hi"}\n'
    )
    first, second = read_trace(tmp_path / "trace.jsonl", rng())
    assert (first.due_s, first.turns[0].text, first.turns[0].max_tokens) == (0.0, "hi", 4)
    assert (second.due_s, len(second.turns[0].text.split())) == (2.5, 7)


# ---- against a server ----------------------------------------------------------------------------


def bench(live: LiveServer, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The result of a run."""
    save = tmp_path / "result.json"
    main(["bench", "serve", "--url", live.url, "--save", str(save), *arguments])
    result: dict[str, Any] = json.loads(save.read_bytes())
    return result


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_request_is_measured_and_usage_is_what_the_server_says(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveServer(FakeIngress(delay_s=0.002)) as live:
        result = bench(
            live, tmp_path, "--endpoint", endpoint, "--requests", "12", "--concurrency", "4", "--prompt", "9",
            "--output", "6", "--slo", "ttft=60,tpot=60", "--field", "user=\"ann\"",
        )  # fmt: skip
        asked = live.ingress.asked
    figures = result["figures"]
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (12, 0, 12 * 6)
    assert figures["prompt_tokens"] > 12 * 9
    assert figures["goodput_share"] == 1.0
    assert figures["requests_per_s"] * figures["seconds"] == pytest.approx(12, rel=0.01)
    assert 0 < figures["ttft_p50_ms"] < figures["e2e_p50_ms"]
    assert figures["tpot_p50_ms"] >= 2.0, "there are 2 ms between tokens"
    assert result["load"]["model"] == MODEL, "the first that the server lists"
    assert result["machine"]["processor"]
    assert {(params.max_tokens, params.temperature) for _, params, _ in asked} == {(6, 0.0)}
    assert {options.origin.tenant for *_, options in asked} == {"ann"}
    assert "time to first token" in capsys.readouterr().out


def test_an_open_loop_does_not_wait_for_answers_and_a_closed_one_does(tmp_path: Path) -> None:
    with LiveServer(FakeIngress(delay_s=0.02)) as live:
        most = 0
        original = live.ingress.open

        def counted(*arguments: Any) -> Any:
            nonlocal most
            most = max(most, live.ingress.num_open + 1)
            return original(*arguments)

        live.ingress.open = counted  # type: ignore[method-assign]
        bench(live, tmp_path, "--requests", "12", "--concurrency", "3", "--output", "4")
        closed, most = most, 0
        result = bench(live, tmp_path, "--requests", "12", "--rate", "1000", "--output", "4")
    assert closed == 3
    assert most > 6
    assert max(request[0] for request in result["requests"]) < 0.2, "due at 1,000 a second"


def test_in_a_closed_loop_no_request_of_a_trace_is_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"time": {at}, "max_tokens": 8, "prompt": "hi"}}\n' for at in (0, 0.01, 0.02)))
    with LiveServer(FakeIngress(delay_s=0.02)) as live:
        result = bench(live, tmp_path, "--trace", str(trace), "--concurrency", "1")
    assert result["figures"]["late_ms"] < 100.0
    assert "too slow" not in capsys.readouterr().out


def test_a_turn_brings_all_that_was_said_before(tmp_path: Path) -> None:
    with LiveServer() as live:
        result = bench(live, tmp_path, "--requests", "2", "--turns", "3", "--output", "4")
        lengths = sorted(len(prompt) for prompt, _, _ in live.ingress.asked)
    assert lengths == [1, 1, 3, 3, 5, 5]
    assert result["figures"]["requests"] == 6


def test_refusals_and_streams_that_fail_are_counted_by_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"time": 0, "max_tokens": 6, "prompt": prompt} for prompt in ("!refuse", "!fail", "!late-bug", "good", "!die")
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with LiveServer() as live:
        result = bench(
            live, tmp_path, "--trace", str(tmp_path / "trace.jsonl"), "--slo", "e2e=60", "--endpoint", "completions"
        )
    assert (result["figures"]["requests"], result["figures"]["failed"]) == (5, 4)
    assert sum(result["errors"].values()) == 4
    assert any(error.startswith("in its stream: ") for error in result["errors"])
    assert any(error[:3].isdigit() for error in result["errors"])
    assert result["figures"]["goodput_share"] == 0.2
    assert "failed: " in capsys.readouterr().out


def test_a_failed_turn_fails_what_is_left_of_its_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ingress = FakeIngress()
    ingress.draining = True
    with LiveServer(ingress) as live, pytest.raises(SystemExit) as ended:
        bench(live, tmp_path, "--requests", "2", "--turns", "3")
    assert ended.value.code == 1
    assert "every request failed" in capsys.readouterr().err
    errors = json.loads((tmp_path / "result.json").read_bytes())["errors"]
    assert errors.pop("an earlier turn failed") == 4
    assert sum(errors.values()) == 2


def test_a_key_is_sent_and_a_wrong_one_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer(server=ServerSection(api_key=["right"])) as live:
        assert bench(live, tmp_path, "--requests", "1", "--api-key", "right")["figures"]["failed"] == 0
        with pytest.raises(SystemExit) as ended:
            bench(live, tmp_path, "--requests", "1", "--key", "wrong")
    assert ended.value.code == 2
    assert "401: invalid_api_key; is --key right?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slo", "ttft"], "'ttft' is not NAME=SECONDS"),
        (["--slo", "speed=1"], "names are ttft, tpot, e2e"),
        (["--turns", "2", "--endpoint", "completions"], "needs --endpoint chat"),
        (["--burst", "2"], "--burst needs --rate"),
        (["--prefix", "-1"], "--prefix: expected a whole number from 0 on, not '-1'"),
        (["--variation", "2"], "--variation: expected a number from 0 to 1, not '2'"),
        (["--rate", "nan"], "--rate: expected a number above 0, not 'nan'"),
        (["--requests", "many"], "--requests: expected a whole number from 1 on, not 'many'"),
        (["--field", "top_k=x"], "the value is no JSON"),
        (["--trace", "nothing.jsonl"], "cannot be read: No such file"),
        (["--trace", "TRACE"], "line 2: give prompt or prompt_tokens"),
        (["--base-url", "http://127.0.0.1:9"], "no server at http://127.0.0.1:9"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"time": 0, "max_tokens": 1, "prompt": "a"}\n{"time": 0, "max_tokens": 1}\n')
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *(str(trace) if one == "TRACE" else one for one in arguments)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_measuring_a_server_imports_no_torch() -> None:
    code = "import sys; from server.extensions.bench import offline, report, run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- on this machine -----------------------------------------------------------------------------


class FakeLLM:
    """Notes what it is asked."""

    max_model_len, vocab_size = 20, 50
    batches: ClassVar[list[tuple[list[list[int]], list[SamplingParams]]]] = []

    def __init__(self, config: Config) -> None:
        self.batches.clear()

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        self.batches.append((prompts, params))


def test_a_batch_is_warmed_up_with_other_tokens_and_fits_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.llm.LLM", FakeLLM)
    save = tmp_path / "offline.json"
    main(["bench", "offline", "some/model", "--sequences", "3", "--longest", "64", "--save", str(save)])
    (others, _), (prompts, params) = FakeLLM.batches
    assert [len(prompt) for prompt in others] == [len(prompt) for prompt in prompts]
    assert others != prompts
    assert max(max(prompt) for prompt in (*others, *prompts)) < 50
    result = json.loads(save.read_bytes())
    assert result["load"] == {"model": "some/model", "sequences": 3, "longest": 10}
    assert result["figures"]["output_tokens"] == sum(one.max_tokens or 0 for one in params) == 3 * 10
    assert all(one.ignore_eos for one in params)
    assert "output tokens/s" in capsys.readouterr().out


# ---- results -------------------------------------------------------------------------------------


def records() -> list[Record]:
    good = [Record(0.0, ttft_s=0.1 * n, e2e_s=0.1 * n + 0.9, output_tokens=10, prompt_tokens=5) for n in range(1, 11)]
    return [*good, Record(0.0, e2e_s=3.0, error="503 overloaded")]


def test_figures_are_of_those_that_ended_well_and_goodput_of_all() -> None:
    figures, errors = report.summarise(records(), 5.0, report.parse_slo("ttft=0.45,tpot=0.2"))
    assert (figures["requests_per_s"], figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (2, 20, 30)
    assert figures["ttft_p50_ms"] == pytest.approx(550)
    assert figures["tpot_p99_ms"] == pytest.approx(100)
    assert figures["goodput_per_s"] == pytest.approx(4 / 5)
    assert figures["goodput_share"] == pytest.approx(4 / 11, abs=1e-4)
    assert errors == {"503 overloaded": 1}


def result(path: Path, scale: float, kind: str = "serve", **load: Any) -> Path:
    figures, errors = report.summarise(records(), 5.0 * scale, {})
    figures["ttft_p95_ms"] *= scale
    made = report.Result(kind, {"cores": 2}, {"model": "m", **load}, figures, errors, report.requests_of(records()))
    report.write(made, path)
    return path


def test_two_results_are_compared_figure_by_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = result(tmp_path / "a.json", 1.0, rate=3), result(tmp_path / "b.json", 2.0, rate=4)
    main(["bench", "compare", str(first), str(second)])
    shown = capsys.readouterr().out
    assert "load differs: rate is 3 and 4" in shown
    lines = {line.strip("│ ").split("│")[0].strip(): line for line in shown.splitlines() if "│" in line}
    assert "2.00" in lines["ttft p95 ms"]
    assert "worse" in lines["ttft p95 ms"]
    assert "0.50" in lines["requests per s"]
    assert "worse" in lines["requests per s"]
    assert "worse" not in lines["ttft p50 ms"]


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "is no result of"), ('{"kind": 3}', "is no result of")]
)  # fmt: skip
def test_what_is_no_result_is_refused(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["bench", "compare", str(result(tmp_path / "a.json", 1.0)), str(tmp_path / "b.json")])
    assert said in capsys.readouterr().err


def test_results_of_two_kinds_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(result(tmp_path / f"{kind}.json", 1.0, kind)) for kind in ("serve", "offline")]
    with pytest.raises(SystemExit):
        main(["bench", "compare", *paths])
    assert "of two kinds, serve and offline" in capsys.readouterr().err


def test_a_plot_is_a_picture_or_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = str(result(tmp_path / "a.json", 1.0)), tmp_path / "plot.png"
    try:
        main(["bench", "compare", path, path, "--plot", str(picture)])
    except SystemExit:
        assert "pip install 'callboard[bench]'" in capsys.readouterr().err
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
