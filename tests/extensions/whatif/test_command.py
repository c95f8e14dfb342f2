"""``callboard whatif``: what it prints, what it refuses and how it says so."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import arguments
from server.cli import main
from server.extensions.whatif.changes import ASKABLE
from tests.features.traffic.recorded import lines, record, requests

MADE = requests(60, 60.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    record(folder, MADE)
    (found,) = (folder / "traces").iterdir()
    return found


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What it prints, whatever its lines are broken by."""
    main(["whatif", *map(str, arguments)])
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Its one line of error."""
    with pytest.raises(SystemExit) as ended:
        main(["whatif", *map(str, arguments)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_was_and_what_would_be_stand_side_by_side(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = said(capsys, path, "--set", "scheduler.max_running=8", "--set", "plugins.policy=fair")
    assert re.search("it was ┃ replayed ┃ changed", output)
    assert "changed: scheduler.max_running=8 plugins.policy=fair" in output
    assert re.search(r"requests that ended │ 60 │ 60 │ 60 │", output)
    assert "variance explained" in output


def test_every_case_is_a_column_and_json_has_them_all(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ("--case", "kv.num_pages=200", "--case", "scheduler.max_running=8", "kv.num_pages=300")
    main(["whatif", str(path), "--set", "plugins.policy=fcfs", *cases, "--json"])
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert [one["changes"] for one in columns] == [
        "", "", "plugins.policy=fcfs kv.num_pages=200",
        "plugins.policy=fcfs scheduler.max_running=8 kv.num_pages=300",
    ]  # fmt: skip
    assert columns[3]["figures"]["ttft_p50_ms"] > 2 * columns[0]["figures"]["ttft_p50_ms"]
    assert [len(one["requests"]) for one in columns] == [60] * 4


@pytest.mark.parametrize("is_there", [False, True])
def test_a_plot_that_cannot_be_drawn_is_said_before_the_work(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: object() if is_there else None)
    with pytest.raises(SystemExit) as ended:
        main(["whatif", str(path), "--plot", "/nowhere/out.png"])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert ("there is no folder '/nowhere'" if is_there else "pip install 'callboard[bench]'") in output.err


def test_a_plot_is_drawn(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    said(capsys, path, "--set", "scheduler.max_running=8", "--plot", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("plugins.attention=torch", "the scheduler does not see this setting"),
        ("model.dtype=float32", "measure it with callboard bench"),
        ("device.threads=4", "What can be asked: kv.num_pages"),
        ("kv.dtype=int8", "--set kv.dtype"),
        ("limits.tokens_per_minute=5", "the scheduler does not see"),
        ("nonsense", "--set nonsense"),
        ("kv.page_size=8", "blocks of 16 tokens"),
        ("kv.page_size=17", "kv.page_size"),
        ("scheduler.max_running=0", "name a number"),
        ("scheduler.max_running=many", "max_running"),
        ("scheduler.max_running=4000", "smaller than scheduler.max_running"),
        ("plugins.policy=unfair", "no policy plugin named 'unfair'"),
        ("plugins.options={'policy.fair' = {weight = 1}}", "plugins"),
        ("kv.num_pages=1", "every request is refused, by context_length_exceeded"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(
    path: Path, capsys: pytest.CaptureFixture[str], change: str, reason: str
) -> None:
    changes = ["--set", change] + (["--set", "plugins.policy=fair"] if "weight" in change else [])
    assert reason in refused(capsys, path, *changes)


def test_everything_that_can_be_asked_is_a_setting() -> None:
    from engine.config import Config

    for section, keys in ASKABLE.items():
        assert set(keys) <= set(getattr(Config(), section).__struct_fields__)


Wrong = Callable[[list[dict[str, Any]]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: lines.pop(0), "line 1: no head"),
        (lambda lines: lines.insert(1, lines[0]), "line 2: a second head"),
        (lambda lines: lines[0].update(format=2), "line 1: format 2; expected one head, of format 1"),
        (lambda lines: lines[0].update(block=0), "line 1: Expected `int` >= 1"),
        (lambda lines: lines[0]["limits"].pop("num_pages"), "line 1: Object missing required field `num_pages`"),
        (lambda lines: lines[0]["settings"]["kv"].update(pages=3), "unknown field `pages`"),
        (lambda lines: lines[0]["settings"]["plugins"].update(proposer="ngram"), "plugins.proposer=ngram"),
        (lambda lines: lines[0]["settings"]["plugins"].update(kv_store="files"), "plugins.kv_store=files"),
        (lambda lines: lines.append({"line": "other"}), "Invalid value 'other'"),
        (lambda lines: lines.append({"line": "request", "at": -1}), "Expected `float` >= 0.0"),
        (lambda lines: lines.append(dict(lines[-1], line="request")), "Object missing required field"),
        (lambda lines: lines.append([1]), "Expected `object`, got `array`"),
        (lambda lines: lines.append({"line": "steps", "steps": [[1, 2]]}), "Expected `array` of at least length 8"),
        (lambda lines: lines[1].update(blocks="AAAA"), "line 2: blocks have 3 bytes"),
        (lambda lines: lines.__delitem__(slice(1, None)), "has no request that has ended"),
        (lambda lines: lines.pop(), "has no steps"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_one_clear_error(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Wrong, reason: str
) -> None:
    changed = lines(path)
    change(changed)
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in changed))
    assert reason in refused(capsys, tmp_path / "trace.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\n", b"{\n", b"null\n", b'{"time": 1, "max_tokens": 2}\n'])
def test_a_file_of_something_else_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "trace.jsonl").write_bytes(content)
    assert "trace.jsonl" in refused(capsys, tmp_path / "trace.jsonl")


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, tmp_path / "none.jsonl")
    assert "directory" in refused(capsys, tmp_path)


def test_a_trace_whose_server_was_killed_ends_before_its_last_line(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.jsonl").write_bytes(path.read_bytes() + b'{"line":"requ')
    assert "requests that ended" in said(capsys, tmp_path / "cut.jsonl")
    (tmp_path / "wrong.jsonl").write_bytes(path.read_bytes() + b'{"line":"requ\n')
    assert f"line {len(lines(path)) + 1}: " in refused(capsys, tmp_path / "wrong.jsonl")
