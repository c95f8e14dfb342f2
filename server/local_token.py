"""The token of this user: what opens the operators' routes on loopback where no operator's key is configured.

Owns: one file, mode 0600, in the cache folder or what stands in for it, and what it must be to be trusted.
Does not know: routes, servers; all servers and commands of a user share it.
"""

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from engine.host.cache_folder import cache_folder, writable_folder

log = logging.getLogger(__name__)

NAME = "operator.token"
TOKEN_BYTES = 32
TOKEN_CHARS = 2 * TOKEN_BYTES


def token_file() -> Path | None:
    """Returns where the token is; None where no folder of this user can be written."""
    folder = writable_folder()
    return None if folder is None else folder / NAME


def read_token() -> str:
    """Returns the token; '' where there is none that only this user could have written."""
    for path in (cache_folder(NAME), token_file()):
        if path is not None and (token := _read(path)):
            return token
    return ""


def _read(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(TOKEN_CHARS + 1)
    except OSError:
        return ""
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or stat.S_IMODE(status.st_mode) & 0o077:
        log.warning("%s is not used: it is not a file of this user with mode 0600; remove it", path)
        return ""
    return text.decode("ascii", "replace") if len(text) == TOKEN_CHARS else ""


def make_token() -> str:
    """Returns the token, which is written first if it is not there; '' if it cannot be."""
    if token := read_token():
        return token
    path = token_file()
    if path is None:
        log.warning("no folder of this user can be written, so operators have no token; set server.operator_key")
        return ""
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        _place(partial, path)
    except OSError as error:
        log.warning("%s cannot be written: %s; set server.operator_key", path, error.strerror or error)
        return ""
    return read_token()


def _place(partial: Path, path: Path) -> None:
    """Give the file its name, unless another server has been sooner; a loss of power may have cut an old one short."""
    try:
        with suppress(FileNotFoundError):
            if path.lstat().st_size != TOKEN_CHARS:
                os.replace(partial, path)
                return
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
