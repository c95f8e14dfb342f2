"""The folder for results that are expensive to compute, kept for the next start.

Owns: the folder, what stands in for it without a home, and replacing a file in it as a whole.
Does not know: the results.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from engine.host.appended_file import whole_file
from engine.host.disk import make_folder


def cache_folder(name: str) -> Path | None:
    """Return the path of ``name`` in callboard's user cache folder, which may not exist yet; None without a home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "callboard" / name


def writable_folder(name: str = "") -> Path | None:
    """Return the path of ``cache_folder``, or else of a folder among temporary files that only this user can enter;
    None if neither can be written.  Without a name it is the folder that has all of them."""
    with suppress(OSError):
        if (folder := cache_folder(name)) is not None:
            if not folder.is_dir():
                make_folder(folder)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    with suppress(OSError):
        own = Path(tempfile.gettempdir(), f"callboard-{os.getuid()}")
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()  # another user may have made it first, or a link of that name
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return own / name if _keeps_names(own.parent) else None
    return None


def _keeps_names(folder: Path) -> bool:
    """Return whether no other user but root can give a name in the folder to something else."""
    found = folder.stat()
    is_safe = found.st_uid in (0, os.getuid())
    return is_safe and bool(found.st_mode & stat.S_ISVTX or not found.st_mode & 0o022)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, even after a power loss.  Raises OSError.

    Threads, and processes in different containers, may write it at the same time."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, partial, content, is_synced=True):
        pass
