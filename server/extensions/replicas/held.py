"""The blocks of prompts that a replica holds, for its routers: exact routing without tokens in the router.

Owns: which page of the cache the end of each block lies in, the changes since a report, the route to it.
Does not know: routers, how a block is hashed.
A request's part has its blocks (``server/proxy/affinity.py``).  A block is held from the first token of a prompt that
has it, until the page of its end leaves the pool: pages before it leave later.  The text between two blocks becomes no
fixed number of tokens, so the page is the one at the same share of the prompt, or one behind it.
"""

import asyncio
import math
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from engine.kv.eviction import Candidate
from engine.kv.node import Handle, chained
from engine.messages import Admit
from engine.scheduling.events import PlannerWatcher
from engine.scheduling.meter import RequestMetrics
from engine.scheduling.rows import Sequence as Row
from engine.types.prompt import RequestPart
from server.http.operation import Handler
from server.proxy.affinity import ENDS, HeldBlocks

HELD: Final = "held_blocks"  # the name of the watcher and of requests' parts
PATH: Final = "/held_blocks"
DIGEST_BYTES: Final = 16
MOST_HELD: Final = 200_000
MOST_CHANGES: Final = 1 << 16
LOOK_EVERY_S: Final = 0.05
WAIT_S: Final = 1.0


def blocks_part(blocks: Sequence[bytes]) -> dict[str, RequestPart]:
    """Returns the part of a request with these blocks."""
    return {HELD: RequestPart(digest="", data=b"".join(blocks))} if blocks else {}


class HeldPrompts(PlannerWatcher):
    """The blocks that an engine's cache holds.  epoch: changes when reports before count no longer."""

    def __init__(self) -> None:
        self.epoch = uuid.uuid4().hex
        self._page_of: OrderedDict[bytes, bytes] = OrderedDict()  # block -> hash of the page of its end
        self._blocks_of: dict[bytes, set[bytes]] = {}
        self._changes: deque[bytes] = deque(maxlen=MOST_CHANGES)
        self._version = 0
        self._parts: dict[int, bytes] = {}
        self._pages: dict[int, dict[bytes, bytes]] = {}  # of requests that compute their prompt

    def arrived(self, sequence: Row, message: Admit) -> None:
        """Keep the request's blocks."""
        if (part := message.parts.get(HELD)) is not None:
            self._parts[sequence.request_id] = part.data

    def matched(self, sequence: Row, handle: Handle, key: bytes, page_bytes: int) -> None:
        """Find the page of the end of each block."""
        if (data := self._parts.get(sequence.request_id)) is None or handle.node is None:
            return
        blocks = [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]
        hashes = list(chained(handle.node.page_hashes[-1], key[handle.num_pages * page_bytes :], page_bytes))
        above, found = handle.node, []
        while above.parent is not None:
            found.append(above.page_hashes)
            above = above.parent
        pages = [page for part in reversed(found) for page in part] + hashes
        # The last block is cut off by the end of the text, which is at or behind the end of the one before it.  With a
        # session in front, each block is at the place of the one behind it, at or behind its own.
        length = ENDS[max(0, len(blocks) - 2)]
        ends = [math.ceil(min(1.0, end / length) * len(pages)) - 1 for end in ENDS[: len(blocks)]]
        if pages:
            self._pages[sequence.request_id] = {
                block: pages[max(0, end)] for block, end in zip(blocks, ends, strict=False)
            }

    def first_token(self, sequence: Row, now: float) -> None:
        """Hold the blocks of a prompt that is computed."""
        for block, page in self._pages.pop(sequence.request_id, {}).items():
            self._drop(block)
            self._page_of[block] = page
            self._blocks_of.setdefault(page, set()).add(block)
            self._note(block)
        while len(self._page_of) > MOST_HELD:
            block = next(iter(self._page_of))
            self._drop(block)
            self._note(block)

    def finished(self, sequence: Row, metrics: RequestMetrics) -> None:
        """Forget the request."""
        self._parts.pop(sequence.request_id, None)
        self._pages.pop(sequence.request_id, None)

    def evicted(self, request_id: int, candidate: Candidate) -> None:
        """Lose the blocks whose end was in these pages."""
        for page in candidate.page_hashes if self._blocks_of else ():
            for block in tuple(self._blocks_of.get(page, ())):
                self._drop(block)
                self._note(block)

    def lost(self, running: Sequence[Row]) -> None:
        """Begin anew: the cache is empty."""
        self._page_of.clear()
        self._blocks_of.clear()
        self.epoch = uuid.uuid4().hex

    def report(self, epoch: str, since: int) -> HeldBlocks:
        """Return what has changed since a report of this epoch and version, or everything that is held."""
        num_new = self._version - since
        if epoch != self.epoch or not 0 <= num_new <= len(self._changes):
            return HeldBlocks(self.epoch, self._version, True, list(self._page_of), [])
        changed = {*islice(reversed(self._changes), num_new)}
        gained = changed & self._page_of.keys()
        return HeldBlocks(self.epoch, self._version, False, list(gained), list(changed - gained))

    def _drop(self, block: bytes) -> None:
        page = self._page_of.pop(block, None)
        if page is not None and (blocks := self._blocks_of.get(page)) is not None:
            blocks.discard(block)
            if not blocks:
                del self._blocks_of[page]

    def _note(self, block: bytes) -> None:
        self._changes.append(block)
        self._version += 1


def reporting(held: HeldPrompts, guard: Middleware) -> Middleware:
    """Returns a guard of a replica that also answers ``PATH``, which no application declares.

    The answer has what has changed since the report that the query names, within a second, or everything."""

    async def report(request: web.Request) -> web.StreamResponse:
        query = request.query
        since = query.get("epoch", ""), int(query["version"]) if query.get("version", "").isdecimal() else 0
        for _ in range(round(WAIT_S / LOOK_EVERY_S)):
            if held.report(*since).version != since[1] or held.epoch != since[0]:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        body = msgspec.msgpack.encode(held.report(*since))
        return web.Response(body=body, content_type="application/msgpack")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard(request, report if request.path == PATH else handler)

    return check
