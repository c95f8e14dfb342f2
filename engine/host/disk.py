"""Names on the disk: a file that was written is there after a loss of power when the folder that names it is synced.

Owns: syncing folders, making them so that they last.  Does not know: what lies in them.
"""

import os
from contextlib import suppress
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Wait until what was made, renamed and removed in a folder outlasts a loss of power.  Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, and those above it, if they are not there; they outlast a loss of power.

    Raises OSError."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    with suppress(PermissionError):  # it was there, in a folder that this user cannot read
        sync_folder(path.parent)
