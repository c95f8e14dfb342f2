"""The KV store's part of a step, pages that are saved and fetched; the requests for pages, and their answers."""

from typing import Final

import msgspec

from engine.messages import FeatureAnswer, FeatureRequest, Step

NAME: Final = "kv_store"


class FetchPages(msgspec.Struct, frozen=True, kw_only=True):
    """Read pages from the store while steps run: as many as the store has in a row, from the first on.

    parent: hash of the page before.  tokens: int32s of whole pages.  timeout_s: answer then with what has come."""

    fetch_id: int
    parent: bytes
    tokens: bytes
    timeout_s: float

    def message(self) -> FeatureRequest:
        """Return it as a message for every rank."""
        body = msgspec.msgpack.encode((self.parent, self.tokens, self.timeout_s))
        return FeatureRequest(feature=NAME, number=self.fetch_id, body=body)

    @classmethod
    def of(cls, message: FeatureRequest) -> "FetchPages":
        """Return the content of a message."""
        parent, tokens, timeout_s = msgspec.msgpack.decode(message.body, type=tuple[bytes, bytes, float])
        return cls(fetch_id=message.number, parent=parent, tokens=tokens, timeout_s=timeout_s)


class PagesFetched(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has so many of the pages that it was to fetch, and keeps them until a step uses or drops them.

    states: the numbers of these pages behind which it has the states of recurrent layers, too."""

    rank: int
    fetch_id: int
    num_pages: int
    states: tuple[int, ...] = ()

    def message(self) -> FeatureAnswer:
        """Return it as a message for the planner."""
        body = msgspec.msgpack.encode((self.num_pages, self.states))
        return FeatureAnswer(rank=self.rank, feature=NAME, number=self.fetch_id, body=body)

    @classmethod
    def of(cls, message: FeatureAnswer) -> "PagesFetched":
        """Return the content of a message."""
        num_pages, states = msgspec.msgpack.decode(message.body, type=tuple[int, tuple[int, ...]])
        return cls(rank=message.rank, fetch_id=message.number, num_pages=num_pages, states=states)


class Landing(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Copy fetched pages into pages of the KV pool.  The executor drops the fetched pages that are not used.

    first: the first of the fetched pages that is used.  pages: int32[k], pages of the pool; none drops all.
    state: the number of fetched pages behind which the states arrive in this step, too; 0 for none."""

    fetch_id: int
    first: int = 0
    pages: bytes = b""
    state: int = 0


class StoreMoves(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Pages that leave for the store, before anything else of the step, and pages that come from it.

    save_pages: int32[V].  save_hashes: their chained hashes, 32 bytes each.
    save_slots: int32[S], slots of states behind pages.  state_hashes: the hashes of these pages."""

    save_pages: bytes = b""
    save_hashes: bytes = b""
    save_slots: bytes = b""
    state_hashes: bytes = b""
    landings: tuple[Landing, ...] = ()

    def part(self) -> dict[str, bytes]:
        """Return the parts of a step with these moves."""
        return {NAME: msgspec.msgpack.encode(self)}


NO_MOVES: Final = StoreMoves()
_decoder = msgspec.msgpack.Decoder(StoreMoves)


def moves_of(step: Step) -> StoreMoves:
    """Return the moves of a step."""
    return _decoder.decode(part) if (part := step.parts.get(NAME)) is not None else NO_MOVES


def sentence(message: FeatureRequest | FeatureAnswer) -> str:
    """Return a message in words."""
    if isinstance(message, FeatureRequest):
        fetch = FetchPages.of(message)
        return f"fetch {fetch.fetch_id}: {len(fetch.tokens) // 4} tokens, for {fetch.timeout_s:g} s at most"
    fetched = PagesFetched.of(message)
    states = f", states behind {fetched.states}" if fetched.states else ""
    return f"fetch {fetched.fetch_id} done on rank {fetched.rank}: {fetched.num_pages} pages{states}"


def without_tokens(part: bytes) -> bytes:
    """Return the part of a step without what follows from the values of tokens."""
    return msgspec.msgpack.encode(msgspec.structs.replace(_decoder.decode(part), save_hashes=b"", state_hashes=b""))
