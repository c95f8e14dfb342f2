"""What a cluster shares: what the head lets its nodes know, and what they say, in torch's key-value store.

Owns: the keys in the store, the shape of what is under them, and its seal.
Does not know: threads, when to say what.
The store knows no passwords: whoever reaches its port may read and write it.  So nothing there is secret, and whatever
is acted upon carries a MAC under the cluster key.  A new notice takes the place of the one before, and so does a rank's
new word: nobody has to read a history, and nobody can misread one.
"""

import hashlib
import hmac
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Literal

import msgspec

from engine.workers.cluster.environment import Cluster
from engine.workers.keys import ClientKeys, KeyPair

KEYS = "callboard"
NOTICE = f"{KEYS}/notice"
BEAT = f"{KEYS}/beat"
MAC_BYTES = 32
MAX_TEXT = 400


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """The head's word to all nodes.

    release: of the head's software, which must be everybody's.  state: 'leaving' while it takes no more requests,
    'done' or 'failed' (with a reason) when it has ended.  generation: counted from 1, for people; nonce: a name that it
    shares with no other one, empty between generations.  endpoints: of the ranks' links, empty for rank 0's.
    """

    release: str
    num_ranks: int
    state: Literal["serving", "leaving", "done", "failed"] = "serving"
    reason: str = ""
    generation: int = 0
    nonce: str = ""
    endpoints: tuple[str, ...] = ()


class NodeStatus(msgspec.Struct, frozen=True, array_like=True):
    """A node's latest word.  nonce: of the generation that it speaks of.  text: why.

    kind: 'here'; 'lost', its executor of that generation is; 'unfit', it gives up, and so would the next one that is
    started there; 'left', it ends."""

    rank: int
    kind: Literal["here", "lost", "unfit", "left"]
    nonce: str = ""
    text: str = ""


class Forged(Exception):
    """Something in the store that was not written with our cluster key."""


class ClusterStore:
    """store: a torch.distributed store.  Every method may wait for it, and raise RuntimeError if it is gone."""

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()

    # ---- the head ---------------------------------------------------------------------------

    def clear(self, ranks: Sequence[int]) -> None:
        """Take away what an earlier head and its nodes may have left."""
        for rank in ranks:
            self._store.set(_slot(rank), b"")

    def post(self, notice: Notice) -> None:
        """Put it in the place of the one before."""
        self._store.set(NOTICE, self._seal(b"notice", notice))

    def beat(self) -> None:
        """The head is alive."""
        self._store.add(BEAT, 1)

    def slots(self, ranks: Sequence[int]) -> list[bytes]:
        """What every rank has in its slot, as it is."""
        return [bytes(one) for one in self._store.multi_get([_slot(rank) for rank in ranks])]

    def read_status(self, sealed: bytes, rank: int) -> NodeStatus:
        """Raises Forged."""
        word: NodeStatus = self._unseal(b"word", sealed, NodeStatus)
        if word.rank != rank:
            raise Forged
        return word

    # ---- a node ---------------------------------------------------------------------------

    def beats(self) -> int:
        """How often the head, or an earlier one, has said that it is alive."""
        return int(self._store.add(BEAT, 0))

    def read(self) -> Notice | None:
        """The notice, if there is one.  Raises Forged."""
        if not self._store.check([NOTICE]):
            return None
        notice: Notice = self._unseal(b"notice", bytes(self._store.get(NOTICE)), Notice)
        return notice

    def say(self, word: NodeStatus) -> None:
        """Put it in the place of the one before."""
        self._store.set(_slot(word.rank), self._seal(b"word", word))

    def take_place(self, nonce: str, rank: int) -> bool:
        """Whether nobody has had this rank's place in that generation before."""
        return bool(self._store.add(f"{KEYS}/place/{nonce}/{rank}", 1) == 1)

    # ---- the seal ---------------------------------------------------------------------------

    def _seal(self, kind: bytes, what: Notice | NodeStatus) -> bytes:
        body = msgspec.msgpack.encode(what)
        return self._mac(kind, body) + body

    def _unseal(self, kind: bytes, sealed: bytes, what: type[Any]) -> Any:
        mac, body = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(kind, body)):
            raise Forged
        try:
            return msgspec.msgpack.decode(body, type=what)
        except msgspec.DecodeError:
            raise Forged from None  # by another version of ourselves

    def _mac(self, kind: bytes, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._key, person=kind, digest_size=MAC_BYTES).digest()


def link_keys(cluster_key: str, nonce: str, rank: int) -> tuple[KeyPair, ClientKeys]:
    """Both ends' keys of one rank's link in one generation: the head's pair, and what the executor needs.

    Each side derives them by itself.  An executor that a generation has left behind has no key to the next one."""
    head = KeyPair.derive(cluster_key, f"link/{nonce}/{rank}/head")
    return head, ClientKeys(KeyPair.derive(cluster_key, f"link/{nonce}/{rank}/executor"), head.public)


def rendezvous(cluster: Cluster, nonce: str) -> str:
    """Where the ranks of one generation form their communicator: in the same store, under a name of its own."""
    return f"store://{cluster.store}/{KEYS}/ranks/{nonce}"


def our_release() -> str:
    """What must be the same on all machines for messages and arithmetic to agree."""
    return ", ".join(f"{name} {_version(name)}" for name in ("callboard", "torch"))


def shortened(text: str) -> str:
    """The text of an error, as it goes into the store."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "of unknown version"


def _slot(rank: int) -> str:
    return f"{KEYS}/rank/{rank}"
