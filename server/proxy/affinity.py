"""The replica that has cached the beginning of a prompt: one that has reported it, or that was just sent it.

The router sees text, the replicas' radix trees hold tokens; equal text of equal requests gives equal tokens, so chained
hashes over blocks of a request's bytes stand for the path in the tree.  A replica reports which blocks it holds, and
which it has lost (``server/extensions/replicas/held.py``), so all routers of a replica know the same of it, also those
that have just started.  A wrong guess costs a prefill, nothing else.

Owns: the blocks, what each replica holds, the memory of what was just sent.
Does not know: HTTP, how busy a replica is.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from zlib import crc32

import msgspec
from msgspec import UNSET, Raw, UnsetType

BLOCK_BYTES = 256  # of the first blocks, about a page or two of tokens
GROWTH = 16  # a block has at least a sixteenth of what is before it, so that long prompts have few
CLOSING = b'"]}'
MOST_CLOSING = 512  # of a prompt's end; JSON that is taken is nested less deep
MAX_BLOCKS = 160  # of one prompt, about 30 MB
MAX_KNOWN = 200_000  # blocks remembered, about 40 MB; the ones longest unused are forgotten


def _ends() -> list[int]:
    ends = [BLOCK_BYTES]
    while len(ends) < MAX_BLOCKS:
        ends.append(ends[-1] + max(BLOCK_BYTES, ends[-1] // GROWTH))
    return ends


ENDS = _ends()  # of the blocks, in bytes


class HeldBlocks(msgspec.Struct, frozen=True, array_like=True):
    """A report of a replica.  epoch, version: to send back for what follows.

    is_whole: ``gained`` is everything that it holds, else what it holds more since the last report.
    lost: blocks that it holds no longer."""

    epoch: str
    version: int
    is_whole: bool
    gained: list[bytes]
    lost: list[bytes]


class _Sender(msgspec.Struct):
    user_id: str | UnsetType = UNSET


class _Prompt(msgspec.Struct):
    """The fields that decide what can be shared or name a session; wrong ones are the replica's to refuse."""

    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    input_ids: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    session_id: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET


class PrefixAffinity:
    """The blocks of prompts that each replica holds, or was just sent."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._sent: OrderedDict[bytes, str] = OrderedDict()
        self._held: dict[str, set[bytes]] = {}
        self._holders_of: dict[bytes, set[str]] = {}  # the same by block
        self._decoder = msgspec.json.Decoder(_Prompt)

    def blocks(self, body: bytes, tenant: str = "", offered_session: str = "") -> list[bytes]:
        """A hash of its session, if it names one, and one per block of the prompt in a request's JSON.

        A block's hash is of everything up to its end: BLAKE2b over a checksum of each block, which is
        faster than over the text.  Two blocks after the same beginning are taken for one another once in 2^32.
        tenant: what requests must have in common to share a cache, e.g. the API key.
        offered_session: its session if no field names one.
        [] for what has no prompt."""
        try:
            asked = self._decoder.decode(body)
        except (ValueError, RecursionError):  # bytes that are no UTF-8 are a ValueError alone
            return []
        every = (asked.prompt, asked.messages, asked.input, asked.input_ids)
        parts = [memoryview(part) for part in every if part is not UNSET]
        if not parts and asked.text is not UNSET:
            parts = [memoryview(asked.text)]  # in /v1/responses it is something else, and stands beside an input
        if not parts:
            return []
        # The closing brackets are left out: the next turn of a conversation goes on in their place.
        text = parts[0] if len(parts) == 1 else memoryview(b"\0".join(parts))
        tail = bytes(text[-MOST_CLOSING:])
        length = len(text) - len(tail) + len(tail.rstrip(CLOSING))
        salt = b"" if asked.cache_salt is UNSET else bytes(asked.cache_salt)
        chain = hashlib.blake2b(tenant.encode("utf-8", "surrogateescape") + b"\0" + salt, digest_size=16)
        hashes, start = [], 0
        if session := _session(asked, offered_session):
            of_session = chain.copy()
            of_session.update(b"\0session\0" + session)
            hashes.append(of_session.digest())
        for end in ENDS:
            if start >= length:
                break
            chain.update(crc32(text[start : min(end, length)]).to_bytes(4))
            hashes.append(chain.digest())
            start = end
        return hashes

    def find(self, blocks: list[bytes], candidates: Iterable[str]) -> list[str]:
        """Returns the candidates with the longest beginning that any of them holds; of several, those of the session.

        Where none holds a beginning, those of the session."""
        offered = candidates if isinstance(candidates, Collection) else list(candidates)
        for block in reversed(blocks):
            if names := self._holders(block, offered):
                return self._holders(blocks[0], names) or names
        return []

    def num_held(self, blocks: list[bytes]) -> dict[str, int]:
        """Returns how many blocks of a prompt's beginning each replica holds; those that hold none are left out."""
        found: dict[str, int] = {}
        for number, block in enumerate(blocks, 1):
            found.update(dict.fromkeys(self._holders_of.get(block, ()), number))
            if (sent := self._sent.get(block)) is not None:
                found[sent] = number
        return found

    def has_beginning(self, blocks: list[bytes], name: str) -> bool:
        """Returns whether a replica holds any of these blocks."""
        return any(self._sent.get(block) == name or name in self._holders_of.get(block, ()) for block in blocks)

    def _holders(self, block: bytes, names: Collection[str]) -> list[str]:
        held, sent = self._holders_of.get(block, ()), self._sent.get(block)
        if not held and sent not in names:
            return []
        return [name for name in names if name == sent or name in held]

    def note(self, blocks: list[bytes], name: str) -> None:
        """Remember that the replica is sent this prompt, until it reports what it holds."""
        # Backwards, so that of one prompt the end is forgotten first.
        for block in reversed(blocks):
            self._sent[block] = name
            self._sent.move_to_end(block)
        while len(self._sent) > self._max_known:
            self._sent.popitem(last=False)

    def learn(self, name: str, report: HeldBlocks) -> None:
        """Take in what a replica reports."""
        held = self._held.setdefault(name, set())
        if report.is_whole:
            self._drop(name, held - set(report.gained))
        for block in report.gained:
            held.add(block)
            self._holders_of.setdefault(block, set()).add(name)
        self._drop(name, report.lost)
        for block in (*report.gained, *report.lost):
            if self._sent.get(block) == name:  # the report is what counts from now on
                del self._sent[block]

    def forget(self, name: str) -> None:
        """Forget what the replica holds, since it has lost its cache."""
        self._sent = OrderedDict((block, owner) for block, owner in self._sent.items() if owner != name)
        self._drop(name, list(self._held.get(name, ())))
        self._held.pop(name, None)

    def _drop(self, name: str, blocks: Iterable[bytes]) -> None:
        """Note that a replica holds some blocks no longer."""
        for block in blocks:
            self._held[name].discard(block)
            if (names := self._holders_of.get(block)) is not None:
                names.discard(name)
                if not names:
                    del self._holders_of[block]


def tenant_of(headers: Mapping[str, str], *, needs_key: bool) -> str:
    """Returns what requests must have in common to share a cache: with keys, only those of one key do."""
    return headers.get("Authorization", headers.get("X-Api-Key", "")) if needs_key else ""


def _session(asked: _Prompt, offered: str) -> bytes:
    """Returns the name of a request's session, '' for none: fields go before what is offered."""
    for given in (asked.session_id, asked.prompt_cache_key):
        if given is not UNSET and bytes(given) not in (b"null", b'""'):
            return bytes(given)
    if asked.metadata is not UNSET:
        try:
            sender = msgspec.json.decode(asked.metadata, type=_Sender)
        except (ValueError, RecursionError):
            sender = _Sender()
        if sender.user_id is not UNSET:
            return sender.user_id.encode()
    return offered.encode()
