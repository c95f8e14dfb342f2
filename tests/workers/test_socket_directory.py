"""The directory of sockets: ours alone, refused where it is not, swept where somebody was killed."""

import os
import stat
from pathlib import Path

import pytest

from engine.types.errors import ConfigError
from engine.workers import socket_directory as directory
from engine.workers.socket_directory import LOCK, SocketDirectory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_it_is_ours_alone_and_gone_when_it_is_removed(base: Path) -> None:
    made = SocketDirectory(base)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert made.endpoint("executor0") == f"ipc://{made.path}/executor0.sock"
    made.remove()
    made.remove()
    assert list(base.iterdir()) == []


def test_without_a_base_it_is_where_such_things_are(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    made = SocketDirectory()
    assert made.path.parent == base
    made.remove()


@pytest.mark.reliability("P8", "a place for sockets that is missing, a symlink, open to others, not writable, not ours")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "No such file"),
        ("symlink", "symbolic link"),
        ("file", "not a directory"),
        ("open to others", "mode 0755.*chmod 700"),
        ("another user's", "belongs to user 65534"),
        ("too deep", "longer than the 107 bytes"),
    ],
)
def test_what_cannot_be_trusted_is_refused_in_one_line(base: Path, how: str, said: str) -> None:
    path = base / "sockets"
    match how:
        case "symlink":
            (base / "real").mkdir(mode=0o700)
            path.symlink_to(base / "real")
        case "file":
            path.touch(0o600)
        case "open to others":
            path.mkdir()
            path.chmod(0o755)
        case "another user's":
            if os.getuid() != 0:
                pytest.skip("only root can give a directory away")
            path.mkdir(mode=0o700)
            os.chown(path, 65534, 65534)
        case "too deep":
            path = base / ("x" * 100)
            path.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=said) as refused:
        SocketDirectory(path).endpoint("executor0")
    assert str(refused.value).startswith("placement.link: ")
    assert "\n" not in str(refused.value)
    assert not list(base.glob("**/executor0*"))


def test_what_a_killed_engine_left_is_swept_and_what_a_live_one_has_is_not(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "YOUNG_S", -1.0)
    live = SocketDirectory(base)
    dead = base / "callboard-dead"
    dead.mkdir(0o700)
    (dead / LOCK).touch()
    (dead / "executor0.sock").touch()
    foreign = base / "callboard-foreign"  # no lock in it: none of ours
    foreign.mkdir()
    another = SocketDirectory(base)
    assert sorted(base.iterdir()) == sorted([live.path, another.path, foreign])
    live.remove(), another.remove()


def test_what_has_just_been_made_is_not_swept(base: Path) -> None:
    young = base / "callboard-young"
    young.mkdir(0o700)
    (young / LOCK).touch()
    SocketDirectory(base).remove()
    assert young.exists()
