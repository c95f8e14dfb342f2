"""Files that callboard wrote, by their exact names: others are neither counted nor removed."""

import os
import re
from pathlib import Path

from engine.host.own_files import own_files, remove_oldest

NAMED = re.compile(r"[0-9]\.log|in/[0-9]\.log")
WITHIN = re.compile("in")


def tree(folder: Path) -> None:
    """Files of 10 bytes, of which 3.log was changed last; and what is no file of that name."""
    for at, name in enumerate(("2.log", "in/1.log", "3.log", "mine.log", "4.log.old", "out/5.log")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (at, at))
    (folder / "6.log").symlink_to(folder / "mine.log")
    (folder / "7.log").mkdir()


def names(folder: Path) -> list[str]:
    return [str(one.path.relative_to(folder)) for one in own_files(folder, NAMED, WITHIN)]


def test_files_of_exact_names_count_the_oldest_first(tmp_path: Path) -> None:
    tree(tmp_path)
    assert names(tmp_path) == ["2.log", "in/1.log", "3.log"]
    assert [one.path.name for one in own_files(tmp_path, NAMED)] == ["2.log", "3.log"]


def test_the_oldest_make_room(tmp_path: Path) -> None:
    tree(tmp_path)
    assert remove_oldest(own_files(tmp_path, NAMED, WITHIN), 30) == 30
    assert remove_oldest(own_files(tmp_path, NAMED, WITHIN), 29) == 20
    assert names(tmp_path) == ["in/1.log", "3.log"]
    assert remove_oldest(own_files(tmp_path, NAMED, WITHIN), 0, until=tmp_path / "3.log") == 10
    assert names(tmp_path) == ["3.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("3.log", "4.log.old", "6.log", "7.log", "in", "mine.log", "out"),
    ]
