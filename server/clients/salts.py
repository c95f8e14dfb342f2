"""Salts that keep the cached prefixes of different keys apart, and a key's old ones from its new requests.

Owns: a salt for each key.  Does not know: requests, the cache.
"""

import hashlib
import secrets
from collections.abc import Callable

import msgspec

from engine.config import ServerSection
from server.clients.auth import key_list

SALT_CHARS = 32


class CacheSalts:
    """The salt of each key.  keep: called with all of them when one has changed, as bytes.

    kept: what an earlier process of the same configuration gave to ``keep``, if there was one."""

    def __init__(
        self, server: ServerSection, *, kept: bytes = b"", keep: Callable[[bytes], None] | None = None
    ) -> None:
        # Not the keys themselves: a salt may show up in a log one day.  With one key all clients are one.
        keys = key_list(server.api_key)
        self._share = server.shared_cache or len(keys) < 2
        self._salts = [""] if self._share else [hashlib.sha256(key.encode()).hexdigest()[:SALT_CHARS] for key in keys]
        if kept:
            self._salts = msgspec.msgpack.decode(kept, type=list[str])
        self._keep = keep

    def of(self, key_number: int | None) -> str:
        """Returns the salt of a client with this key."""
        return self._salts[self._sharers(key_number)]

    def renew(self, key_number: int | None) -> None:
        """Change the salt of a client, and of those it shares it with: nothing is found any more that was cached."""
        self._salts[self._sharers(key_number)] = secrets.token_hex(SALT_CHARS // 2)
        if self._keep is not None:
            self._keep(msgspec.msgpack.encode(self._salts))

    def _sharers(self, key_number: int | None) -> int:
        """Returns the index of the salt that a client has, maybe together with others."""
        return 0 if self._share or key_number is None else key_number
