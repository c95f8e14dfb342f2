"""The folder for results that are expensive to compute, kept for the next start.

Owns: the folder, and replacing a file in it as a whole.  Does not know: the results.
"""

import os
from pathlib import Path
from uuid import uuid4

from engine.host.appended_file import whole_file


def cache_folder(name: str) -> Path | None:
    """Return the path of ``name`` in callboard's user cache folder, which may not exist yet; None without a home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "callboard" / name


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, even after a power loss.  Raises OSError.

    Threads, and processes in different containers, may write it at the same time."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, partial, content, is_synced=True):
        pass
