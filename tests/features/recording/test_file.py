"""Files that are cut, damaged, foreign or hostile."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.features.recording.file import FORMAT, NAME, RecordingError, read_recording
from engine.features.recording.replay import Replay
from engine.features.recording.state import StateError, state_entries, state_of
from engine.host.appended_file import HEADER
from tests.features.recording.driver import Driver


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    driver = Driver(tmp_path_factory.mktemp("recordings"), limit_bytes=20_000)
    driver.recorder.alert = lambda why: None  # type: ignore[method-assign]
    driver.run(12)
    driver.recorder.write("test")
    (path,) = driver.written()
    return path.read_bytes()


def frames(whole: bytes) -> list[int]:
    """Where each frame begins, and the end."""
    at, starts = whole.index(b"\n") + 1, []
    while at < len(whole):
        starts.append(at)
        at += HEADER.size + HEADER.unpack_from(whole, at)[0]
    return [*starts, len(whole)]


def test_a_file_that_was_cut_is_replayed_as_far_as_it_goes(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "torn.cbr"
    *_, end, _ = frames(written)
    path.write_bytes(written[:end])
    torn = read_recording(path)
    assert torn.torn == "its end is missing"
    replay = Replay(torn)
    list(replay)
    assert replay.num_turns == len(torn.turns) > 0
    assert replay.digest == replay.recorded_digest
    path.write_bytes(written[: end + 5])
    assert "cut or damaged" in read_recording(path).torn


def test_the_command_says_how_far_a_file_goes_that_was_cut(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "torn.cbr"
    *_, end, _ = frames(written)
    for content, code in ((written, 0), (written[:end], 5)):
        path.write_bytes(content)
        command = [sys.executable, "-m", "callboard", "replay", str(path), "--quiet"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout
    last = len(read_recording(path).turns) - 1
    assert done.stdout.splitlines()[-1] == f"the file is not whole: its end is missing; it goes as far as turn {last}"


def test_a_cut_before_the_first_turn_is_refused(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "torn.cbr"
    header, state, *_ = frames(written)
    for length, words in ((header + 7, "nothing of it"), (state + 30, "replayed"), (0, "not a recording")):
        path.write_bytes(written[:length])
        if length == state + 30:
            assert not read_recording(path).turns
            continue
        with pytest.raises(RecordingError, match=words):
            read_recording(path)


def test_a_damaged_byte_is_noticed(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.cbr"
    for start in frames(written)[:-1]:
        damaged = bytearray(written)
        damaged[start + HEADER.size] ^= 1
        path.write_bytes(damaged)
        try:
            said = read_recording(path).torn
        except RecordingError as error:
            said = str(error)
        assert "damaged" in said


def test_other_formats_are_refused_by_their_number(written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.cbr"
    path.write_bytes(written.replace(NAME + b"%d" % FORMAT, NAME + b"%d" % (FORMAT + 1), 1))
    with pytest.raises(RecordingError, match=f"format {FORMAT + 1}, and this callboard reads format {FORMAT}"):
        read_recording(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.cbr"], "No such file"),
        (["."], "Is a directory"),
        (["text.cbr"], "not a recording"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_file(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "text.cbr").write_text("some text\n")
    command = [sys.executable, "-m", "callboard", "replay", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "entries",
    [
        [("object", "subprocess:Popen")],
        [("partial", [1], [2], [3]), ("named", "os:system"), ("tuple", "", "true"), ("dict",)],
        [("named", "engine.scheduling.rows:np")],
        [("enum", "engine.workers.child:Ticket", 1)],
        [("tuple", "builtins:open", "x")],
        [("method", [1], "__class__"), ("object", "engine.scheduling.rows:RowTable")],
        [("array", "|O8", [1], True, b"12345678")],
        [("object", "engine.scheduling.rows:Missing")],
        [("tuple", "", [5])],
        [("what",)],
        [],
    ],
)
def test_a_state_names_nothing_but_what_schedulers_are_made_of(entries: list[tuple[object, ...]]) -> None:
    with pytest.raises(StateError):
        state_of(msgspec.msgpack.decode(msgspec.msgpack.encode(entries)), [])


def test_what_has_no_form_is_refused_by_its_type() -> None:
    for one in (object(), open, lambda: None, (one for one in ())):
        with pytest.raises(StateError, match=r"has no form|is known by no name"):
            list(state_entries([one]))
