"""The replica that has probably cached the beginning of a prompt: the one that was last sent it.

The router sees text, the replicas' radix trees hold tokens; equal text of equal requests gives equal tokens, so chained
hashes over blocks of a request's bytes stand for the path in the tree.  A wrong guess costs a prefill, nothing else.

Owns: the blocks, and the memory of which replica was sent which.  Does not know: HTTP, how busy a replica is.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Container

import msgspec
from msgspec import UNSET, Raw, UnsetType

BLOCK_BYTES = 256  # about a page or two of tokens
MAX_BLOCKS = 128  # of one prompt; prompts that agree on 32 KB go to the same replica anyway
MAX_KNOWN = 200_000  # blocks remembered, about 40 MB; the ones longest unused are forgotten


class _Prompt(msgspec.Struct):
    """The fields that decide what can be shared; wrong ones are the replica's to refuse."""

    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    input_ids: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET


class PrefixAffinity:
    """Remembers, for each block of each prompt, the replica it was sent to last."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._sent: OrderedDict[bytes, str] = OrderedDict()
        self._decoder = msgspec.json.Decoder(_Prompt)

    def blocks(self, body: bytes, tenant: str = "") -> list[bytes]:
        """A hash per block of the prompt in a request's JSON, each of everything up to its end.

        tenant: what requests must have in common to share a cache, e.g. the API key.  [] for what has no prompt."""
        try:
            asked = self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return []
        every = (asked.prompt, asked.messages, asked.input, asked.input_ids)
        parts = [bytes(part) for part in every if part is not UNSET]
        if not parts and asked.text is not UNSET:
            parts = [bytes(asked.text)]  # in /v1/responses it is something else, and stands beside an input
        if not parts:
            return []
        # The closing brackets are left out: the next turn of a conversation goes on in their place.
        text = b"\0".join(parts).rstrip(b'"]}')
        salt = b"" if asked.cache_salt is UNSET else bytes(asked.cache_salt)
        chain = hashlib.blake2b(tenant.encode() + b"\0" + salt, digest_size=16)
        hashes = []
        for start in range(0, min(len(text), BLOCK_BYTES * MAX_BLOCKS), BLOCK_BYTES):
            chain.update(text[start : start + BLOCK_BYTES])
            hashes.append(chain.digest())
        return hashes

    def find(self, blocks: list[bytes], candidates: Container[str]) -> tuple[str | None, int]:
        """(the candidate that was sent the longest beginning, its blocks), or (None, 0)."""
        for count in range(len(blocks), 0, -1):
            name = self._sent.get(blocks[count - 1])
            if name is not None and name in candidates:
                return name, count
        return None, 0

    def note(self, blocks: list[bytes], name: str) -> None:
        """Remember that the replica is sent this prompt."""
        # Backwards, so that of one prompt the end is forgotten first.
        for block in reversed(blocks):
            self._sent[block] = name
            self._sent.move_to_end(block)
        while len(self._sent) > self._max_known:
            self._sent.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget what the replica was sent, since it has lost its cache."""
        self._sent = OrderedDict((block, owner) for block, owner in self._sent.items() if owner != name)
