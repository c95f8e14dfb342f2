"""The folder of results that cost time to find and are kept for the next start.

Owns: the folder, and replacing a file in it as a whole.  Does not know: what is kept.
"""

import os
from pathlib import Path
from uuid import uuid4

from engine.host.appended_file import whole_file


def cache_folder(name: str) -> Path | None:
    """Return the path of a name in callboard's part of the user's cache folder; None without a home.

    It need not exist."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "callboard" / name


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, so that a reader sees the old content or the new one, after a loss of power too.  Raises OSError.

    Threads, and processes that share the folder and not their numbers, may write it at the same time."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, partial, content, is_synced=True):
        pass
