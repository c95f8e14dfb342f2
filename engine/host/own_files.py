"""The files of a folder that callboard has written, by their exact names, of which the oldest make room for others.

Owns: which entries of a folder count, and which of them go.  Does not know: what the files say.
A file of another name, a link and a folder are neither counted nor removed.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class OwnFile(NamedTuple):
    """A file.  The one that was changed first sorts first."""

    changed_ns: int
    num_bytes: int
    path: Path


def own_files(folder: Path, named: re.Pattern[str], within: re.Pattern[str] | None = None) -> list[OwnFile]:
    """Return the files whose paths in the folder match as a whole, the oldest first.  Raises OSError.

    within: the names of folders in it that are searched as well."""
    found = []
    for top in os.scandir(folder):
        is_within = within is not None and within.fullmatch(top.name) is not None and top.is_dir(follow_symlinks=False)
        for entry in os.scandir(top.path) if is_within else (top,):
            name = f"{top.name}/{entry.name}" if is_within else entry.name
            with suppress(FileNotFoundError):  # another process was faster
                if named.fullmatch(name) is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append(OwnFile(stat.st_mtime_ns, stat.st_size, Path(entry.path)))
    return sorted(found)


def remove_oldest(files: Sequence[OwnFile], most_bytes: int, *, until: Path | None = None) -> int:
    """Remove files, the first first, until those that are left take at most so many bytes; return what they take.

    until: a file that is kept, and all behind it."""
    num_bytes = sum(one.num_bytes for one in files)
    for one in files:
        if num_bytes <= most_bytes or one.path == until:
            break
        one.path.unlink(missing_ok=True)
        num_bytes -= one.num_bytes
    return num_bytes
