"""What keeps the cached prefixes of clients with different keys apart, and a client's old ones from its new requests.

Owns: a salt for each key.  Does not know: requests, the cache.
"""

import hashlib
import secrets
from collections.abc import Callable

import msgspec

from engine.sections import ServerSection
from server.auth import key_list
from server.clients.auth import key_list

SALT_CHARS = 32


class Salts:
    """kept: what another one of the same configuration has given to ``keep``, if there was one.

    keep: called with what has changed."""

    def __init__(
        self, server: ServerSection, *, kept: bytes = b"", keep: Callable[[bytes], None] | None = None
    ) -> None:
        # Not the keys themselves: a salt may show up in a log one day.  With one key there is nobody to tell apart.
        keys = key_list(server.api_key)
        self._share = server.shared_cache or len(keys) < 2
        self._salts = [""] if self._share else [hashlib.sha256(key.encode()).hexdigest()[:SALT_CHARS] for key in keys]
        if kept:
            self._salts = msgspec.msgpack.decode(kept, type=list[str])
        self._keep = keep

    def of(self, key_number: int | None) -> str:
        """That of a client with this key."""
        return self._salts[self._sharers(key_number)]

    def renew(self, key_number: int | None) -> None:
        """Nothing is found any more that was cached for this client, and for those it shares that with."""
        self._salts[self._sharers(key_number)] = secrets.token_hex(SALT_CHARS // 2)
        if self._keep is not None:
            self._keep(msgspec.msgpack.encode(self._salts))

    def _sharers(self, key_number: int | None) -> int:
        """Who shares cached prefixes with a client, as an index."""
        return 0 if self._share or key_number is None else key_number
