"""Durable names on the disk: a written file survives a power loss once its folder is synced.

Owns: syncing folders, making durable ones.  Does not know: their contents.
"""

import os
from contextlib import suppress
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Wait until files made, renamed and removed in a folder survive a power loss.  Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, and missing ones above it, so that they survive a power loss.

    Raises OSError."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    with suppress(PermissionError):  # the folder existed, in one that this user cannot read
        sync_folder(path.parent)
