"""The keys that clients must bring: from the configuration, or from a file that may change while the server runs.

Owns: names, digests and kinds of keys, the comparison, reading the file again.  Does not know: routes, limits.
The file is TOML: ``[clients]`` and ``[operators]``, each a table of names and keys, ``name = 'key'`` or
``name = { key = 'key', expires = 2027-01-31T00:00:00Z }``.  ``sha256:`` and a key's digest in hexadecimal stand for it.
The file is looked at no more than once a second, and only when a key is to be checked.  One that cannot be read or
holds nonsense changes nothing: the keys of before go on, and the log says why.
"""

import hashlib
import hmac
import logging
import math
import os
import re
import time
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from engine.config import MIN_KEY
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError, RequestError
from server.local_token import make_token, token_file

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 1 << 20
SALT_CHARS = 32
HASH = "sha256:"
HASHED = re.compile(f"{HASH}([0-9a-fA-F]{{64}})")


class Key(msgspec.Struct, frozen=True):
    """name: what logs call its client.  digest: SHA-256 of the key.  is_operator: whether it opens what operators use.
    is_named: the name is the operator's, and not the key's place in a list.

    expires_at: Unix seconds from which on it opens nothing.
    salt: separates what is cached for it from what is cached for others; says nothing of the key."""

    name: str
    digest: bytes
    is_operator: bool = False
    is_named: bool = False
    expires_at: float = math.inf

    @property
    def salt(self) -> str:
        # Not the key itself: a salt may show up in a log one day.
        return self.digest.hex()[:SALT_CHARS]

    @property
    def owner(self) -> str:
        """To whom belongs what its client stores or streams: a name may get another key, a place another client."""
        return f"name:{self.name}" if self.is_named else f"key:{self.salt}"


class KeyRevoked(RequestError):
    """What is to be done belongs to a key that is none any more."""


class DatedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that opens nothing any more from some time on."""

    key: str
    expires: Annotated[datetime, msgspec.Meta(tz=True)]


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds: name -> key."""

    clients: dict[str, str | DatedKey] = {}
    operators: dict[str, str | DatedKey] = {}


def read_keys(server: ServerSection) -> list[Key]:
    """All keys of now.  Raises ConfigError for a file that cannot be used."""
    given = [server.api_key] if isinstance(server.api_key, str) else server.api_key
    keys = [_key(f"key {number}", key) for number, key in enumerate(key for key in given if key)]
    if server.operator_key:
        keys.append(_key("operator", server.operator_key, is_operator=True))
    if not server.key_file:
        return keys
    said = f"server.key_file={server.key_file}"
    try:
        with Path(server.key_file).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{said}: larger than {MAX_FILE_BYTES} bytes")
        found = msgspec.convert(tomllib.loads(text.decode()), KeyFile)
    except OSError as error:
        raise ConfigError(f"{said}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # of UTF-8, TOML and msgspec
        wanted = "expected TOML with [clients] and [operators], each with lines of name = 'key', or name = "
        wanted += "{ key = 'key', expires = 2027-01-31T00:00:00Z }"
        raise ConfigError(f"{said}: {error}; {wanted}") from None
    keys += [_key(name, key, is_named=True) for name, key in found.clients.items()]
    keys += [_key(name, key, is_operator=True, is_named=True) for name, key in found.operators.items()]
    for name, one in (*found.clients.items(), *found.operators.items()):
        _check_key(f"{said}: {name}", one if isinstance(one, str) else one.key)
    if not keys:
        raise ConfigError(f"{said}: holds no key; nobody could send a request")
    if len({key.digest for key in keys}) < len(keys) or len({key.name for key in keys}) < len(keys):
        raise ConfigError(f"{said}: two lines have the same name or the same key")
    return keys


class Keys:
    """The keys of now.  clock: seconds that only grow; wall: Unix seconds.

    of_clients: whether clients need one.  If not, and no operator has one, the token of this user is an operator's.
    has_operators: whether any key is an operator's, or was.

    A file that cannot be used is an error at the server's start, where ``read_keys`` is asked first.  Later it changes
    nothing; a frontend that starts anew meanwhile has none of its keys until it is mended.
    """

    def __init__(
        self,
        server: ServerSection,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.of_clients = server.needs_key
        self.has_operators = False
        self._wall = wall
        self._server = server
        self._clock = clock
        self._looked_at = clock()
        self._mark = self._marked()
        self._keys: list[Key] = []
        self._read()

    def find(self, given: bytes) -> Key | None:
        """The key that equals ``given``; None if there is none."""
        self._look()
        digest = hashlib.sha256(given).digest()
        # All of them, whichever it is: the time says neither how much of a key was right nor which one.
        matches = [hmac.compare_digest(digest, key.digest) for key in self._keys]
        found = self._keys[matches.index(True)] if any(matches) else None
        return None if found is None or found.expires_at <= self._wall() else found

    def of_owner(self, owner: str, what: str) -> Key | None:
        """The key whose client something belongs to; None where there are no keys.  what: it is, for the error.

        Raises KeyRevoked if no such key opens anything any more."""
        self._look()
        now = self._wall()
        key = next((key for key in self._keys if owner and key.owner == owner and key.expires_at > now), None)
        if key is None and (owner or self._server.needs_key):
            raise KeyRevoked(f"the API key of this {what} is no longer valid", status=403, code="key_revoked")
        return key

    def _look(self) -> None:
        """Read the file again if it has changed."""
        if self._server.key_file and self._clock() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = self._clock()
            if (mark := self._marked()) != self._mark:
                self._mark = mark
                self._read()

    def _marked(self) -> tuple[int, ...]:
        """What changes with the file; also if another one takes its place, as with Kubernetes' mounted secrets."""
        try:
            status = os.stat(self._server.key_file)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> None:
        try:
            self._keys = read_keys(self._server)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
            return
        if not self._keys and (token := make_token()):
            self._keys = [_key("operator", token, is_operator=True)]
            log.info("the routes of operators take the token in %s as their key", token_file())
        # What operators see never falls open because their keys are gone.
        self.has_operators |= any(key.is_operator for key in self._keys)
        if self._server.key_file:
            log.info("%s was read: %d keys", self._server.key_file, len(self._keys))


def _key(name: str, given: str | DatedKey, *, is_operator: bool = False, is_named: bool = False) -> Key:
    key, expires_at = (given, math.inf) if isinstance(given, str) else (given.key, given.expires.timestamp())
    hashed = HASHED.fullmatch(key)
    digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()
    return Key(name, digest, is_operator, is_named, expires_at)


def _check_key(said: str, key: str) -> None:
    """Raise ConfigError for a key that could be guessed, or that is meant for a digest and is none."""
    if not key:
        raise ConfigError(f"{said}: the key is empty; take its line out to lock its client out")
    if key.startswith(HASH) and HASHED.fullmatch(key) is None:
        raise ConfigError(f"{said}: expected 64 hexadecimal digits after {HASH}")
    if len(key) < MIN_KEY:
        raise ConfigError(
            f"{said}: {len(key)} characters, expected at least {MIN_KEY}: openssl rand -hex 32 makes some"
        )
