"""The directory that unix sockets live in: ours alone, and gone again soon.

Owns: its making, its checks, its end, and the sweep of what a killed engine may have left.
Does not know: sockets, messages.
The peers of a link are connected within moments of their start, and a connected socket needs its file no longer: so
``remove`` comes early, and an engine that is killed later on leaves nothing.  One that is killed in those
moments, or whose several ranks meet in a file here for as long as they live, leaves a directory whose lock nobody
holds; the next engine sweeps it.
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
OWN = re.compile(r"lock|ranks|.+\.sock")  # all that is ever made in one
LONGEST_PATH = 107  # bytes that fit a unix socket's address
YOUNG_S = 60.0  # nobody may have locked it yet


class SocketDirectory:
    """A fresh directory with mode 0700 below ``base`` (None: the system's directory for such things).

    Raises ConfigError if ``base`` is missing, a symlink, somebody else's, open to others, or too deep."""

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
        """The ZeroMQ address of a socket in here."""
        path = self.path / f"{name}.sock"
        if len(os.fsencode(path)) > LONGEST_PATH:
            self.remove()
            raise ConfigError(f"placement.link: {path} is longer than the {LONGEST_PATH} bytes of a socket's address")
        return f"ipc://{path}"

    def remove(self) -> None:
        """Nothing of it is left; again: no effect."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


class Rendezvous:
    """Where the ranks of one generation find each other, and what their library keeps there for as long as they are a
    group.  One rank needs none.  where: as ``placement.link`` says it."""

    def __init__(self, num_ranks: int, where: str = "unix") -> None:
        self._directory = SocketDirectory(base_of(where)) if num_ranks > 1 else None
        self.url = f"file://{self._directory.path}/ranks" if self._directory is not None else ""

    def end(self) -> None:
        """The group is no more."""
        if self._directory is not None:
            self._directory.remove()


def base_of(where: str) -> Path | None:
    """The directory that ``placement.link`` names for sockets, if it names one."""
    base = where.removeprefix("unix").removeprefix(":") if where.startswith("unix") else ""
    return Path(base) if base else None


def _checked(base: Path) -> Path:
    """A directory that only we can enter."""
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
        reason = f"belongs to user {found.st_uid}, not to us ({os.getuid()})"
    elif found.st_mode & 0o077:
        reason = f"has mode {stat.S_IMODE(found.st_mode):04o}, so others get in; chmod 700 it"
    elif not os.access(base, os.W_OK | os.X_OK):
        reason = "is not writable"
    if reason is not None:
        raise ConfigError(f"placement.link: {base} {reason}")
    return base


def _sweep(parent: Path) -> None:
    """Remove what engines have left that were killed while they started."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if time.time() - found.st_mtime < YOUNG_S:
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or none of ours
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
