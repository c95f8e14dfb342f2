"""The KV store's part of a step: pages that are saved, and the pages of the pool that fetched pages go to."""

from typing import Final

import msgspec

from engine.messages import Step

NAME: Final = "kv_store"


class Landing(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Copy fetched pages into pages of the KV pool.  The executor drops the fetched pages that are not used.

    first: the first of the fetched pages that is used.  pages: int32[k], pages of the pool; none drops all."""

    fetch_id: int
    first: int = 0
    pages: bytes = b""


class StoreMoves(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Pages that leave for the store, before anything else of the step, and pages that come from it.

    save_pages: int32[V].  save_hashes: their chained hashes, 32 bytes each."""

    save_pages: bytes = b""
    save_hashes: bytes = b""
    landings: tuple[Landing, ...] = ()

    def part(self) -> dict[str, bytes]:
        """Return the parts of a step with these moves."""
        return {NAME: msgspec.msgpack.encode(self)}


NO_MOVES: Final = StoreMoves()
_decoder = msgspec.msgpack.Decoder(StoreMoves)


def moves_of(step: Step) -> StoreMoves:
    """Return the moves of a step."""
    return _decoder.decode(part) if (part := step.parts.get(NAME)) is not None else NO_MOVES


def without_tokens(part: bytes) -> bytes:
    """Return the part of a step without what follows from the values of tokens."""
    return msgspec.msgpack.encode(msgspec.structs.replace(_decoder.decode(part), save_hashes=b""))
