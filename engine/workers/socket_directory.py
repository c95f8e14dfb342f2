"""The directory of unix sockets: it is this user's alone, and short-lived.

Owns: its making, its checks, its end, and the sweep of directories that killed engines have left.
Does not know: sockets, messages.
The peers of a link connect within moments of their start, and a connected socket does not need its file any more: so
``remove`` is called early, and an engine that is killed later leaves nothing.  An engine that is killed in those
moments, or has several ranks, which meet in a file here for their whole life, leaves a directory with an unheld lock;
the next engine sweeps it.
"""

import fcntl
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from engine.types.errors import ConfigError

PREFIX = "callboard-"
LOCK = "lock"
OWN = re.compile(r"lock|ranks|.+\.sock")  # every file that is ever made in one
LONGEST_PATH = 107  # bytes that fit a unix socket's address
YOUNG_S = 60.0  # a younger directory may not be locked yet


class SocketDirectory:
    """A fresh directory with mode 0700 below ``base`` (None: the system's directory for temporary sockets).

    Raises ConfigError if ``base`` is missing, a symlink, another user's, open to others, or too deep."""

    def __init__(self, base: Path | None = None) -> None:
        parent = (
            _checked(base) if base is not None else Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        )
        _sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"placement.link: cannot make sockets in {parent}: {error.strerror}") from None
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def endpoint(self, name: str) -> str:
        """Return the ZeroMQ address of a socket in the directory."""
        path = self.path / f"{name}.sock"
        if len(os.fsencode(path)) > LONGEST_PATH:
            self.remove()
            raise ConfigError(f"placement.link: {path} is longer than the {LONGEST_PATH} bytes of a socket's address")
        return f"ipc://{path}"

    def remove(self) -> None:
        """Remove the directory; idempotent."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


class Rendezvous:
    """The place where the ranks of one generation find each other and torch.distributed keeps its file.

    One rank needs none.  where: an address as in ``placement.link``."""

    def __init__(self, num_ranks: int, where: str = "unix") -> None:
        self._directory = SocketDirectory(base_of(where)) if num_ranks > 1 else None
        self.url = f"file://{self._directory.path}/ranks" if self._directory is not None else ""

    def end(self) -> None:
        """Remove the group's directory."""
        if self._directory is not None:
            self._directory.remove()


def base_of(where: str) -> Path | None:
    """Return the directory that ``placement.link`` names for sockets, or None."""
    base = where.removeprefix("unix").removeprefix(":") if where.startswith("unix") else ""
    return Path(base) if base else None


def _checked(base: Path) -> Path:
    """Return a directory that only this user can enter."""
    try:
        found = base.lstat()
    except OSError as error:
        raise ConfigError(f"placement.link: {base}: {error.strerror}") from None
    reason = None
    if stat.S_ISLNK(found.st_mode):
        reason = "is a symbolic link; name the directory itself"
    elif not stat.S_ISDIR(found.st_mode):
        reason = "is not a directory"
    elif found.st_uid != os.getuid():
        reason = f"belongs to user {found.st_uid}, not to this process's user {os.getuid()}"
    elif found.st_mode & 0o077:
        reason = f"has mode {stat.S_IMODE(found.st_mode):04o}, so other users can enter it; chmod 700 it"
    elif not os.access(base, os.W_OK | os.X_OK):
        reason = "is not writable"
    if reason is not None:
        raise ConfigError(f"placement.link: {base} {reason}")
    return base


def _sweep(parent: Path) -> None:
    """Remove the directories of engines that were killed during their start."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if time.time() - found.st_mtime < YOUNG_S:
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not a socket directory
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its engine lives
        else:
            with suppress(OSError):
                if all(map(OWN.fullmatch, os.listdir(path))):
                    _remove(path)
        finally:
            os.close(lock)


def _remove(path: Path) -> None:
    """Remove a directory, unless it has anything that is none of its own."""
    with suppress(OSError):
        for name in filter(OWN.fullmatch, os.listdir(path)):
            (path / name).unlink()
        path.rmdir()
