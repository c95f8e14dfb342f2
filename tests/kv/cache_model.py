"""A radix tree beside a dict that knows what it should hold, and a memory that knows what was written to each page.

The model's truth is per page: (namespace, the elements up to the page's end) -> device page, and how that prefix was
used, by walking every page of a path on every use.  The tree must agree although it does none of that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from engine.features.host_tier.tree import TieredTree
from engine.kv.eviction import EvictionStrategy
from engine.kv.match import Match
from engine.kv.node import SHARED, Handle, Namespace, Node, Published, page_indices
from engine.kv.pages import PageAllocator
from engine.kv.radix import RadixTree
from engine.plugins.hookspecs import EvictionContext
from engine.plugins.manager import Plugins

STRATEGIES = ("fifo", "lease", "lfu", "lru", "priority", "s3fifo", "slru")
Prefix = tuple[Namespace, tuple[object, ...]]


def strategy(name: str = "lru", num_pages: int = 40, **options: object) -> EvictionStrategy:
    """A built-in, through the door that plugins come through."""
    context = EvictionContext(page_size=1, num_pages=num_pages, options=options)
    return Plugins({"eviction": name}).hook.callboard_eviction_strategy(context=context)


@dataclass
class Use:
    """How a page was used."""

    hits: int
    last_used: int
    priority: int
    num_pages: int = 1
    created: int = 0


@dataclass(eq=False)
class Request:
    """One that runs: its page-table row and how many tokens it has computed."""

    namespace: Namespace
    tokens: np.ndarray
    handle: Handle
    priority: int
    row: list[int] = field(default_factory=list)
    computed: int = 0


class CacheModel:
    """A tree, a pool, the requests that run, and the truth."""

    def __init__(self, page_size: int, strategy_name: str = "lru", num_pages: int = 40, *, bigram: bool = False,
                 num_host_pages: int = 0) -> None:  # fmt: skip
        self.page_size, self.bigram, self.num_pages, self.num_host_pages = page_size, bigram, num_pages, num_host_pages
        self.strategy_name, self.strategy = strategy_name, strategy(strategy_name)
        kind = partial(TieredTree, num_host_pages=num_host_pages) if num_host_pages else RadixTree
        self.tree = kind(page_size, self.strategy, lookahead=int(bigram), record_events=True)
        self.allocator = PageAllocator(num_pages)
        self.requests: list[Request] = []
        self.cached: dict[Prefix, int] = {}
        self.uses: dict[Prefix, Use] = {}
        self.memory: dict[int, Prefix] = {}
        self.host_memory: dict[int, Prefix] = {}
        self.seen = dict.fromkeys(("hits", "duplicates", "evicted", "partly", "restored", "stale", "grown"), 0)

    # ---- keys -------------------------------------------------------------------------------

    def elements(self, tokens: np.ndarray) -> list[object]:
        """What a key consists of."""
        ids = tokens.tolist()
        return list(pairwise(ids)) if self.bigram else ids

    def prefixes(self, namespace: Namespace, tokens: np.ndarray) -> list[Prefix]:
        """One for each whole page."""
        elements = self.elements(tokens)
        ends = range(self.page_size, len(elements) + 1, self.page_size)
        return [(namespace, tuple(elements[:end])) for end in ends]

    def kept(self, request: Request) -> list[Prefix]:
        """The prefixes that a request's handle keeps."""
        return self.prefixes(request.namespace, request.tokens)[: request.handle.num_pages]

    # ---- what a scheduler does --------------------------------------------------------------

    def look(self, tokens: np.ndarray, namespace: Namespace = SHARED) -> Match:
        """Match all but the last token, and compare with the dict."""
        match = self.tree.match(self.tree.key(tokens[:-1]), namespace)
        expected: list[int] = []
        for prefix in self.prefixes(namespace, tokens[:-1]):
            if prefix not in self.cached:
                break
            expected.append(self.cached[prefix])
        assert match.pages.tolist() == expected
        assert match.num_pages == len(expected)
        return match

    def admit(self, tokens: np.ndarray, namespace: Namespace = SHARED, priority: int = 0,
              match: Match | None = None) -> Request:  # fmt: skip
        """Lock a match, which may be an old one."""
        if match is None:
            match = self.look(tokens, namespace)
        else:
            self.seen["stale"] += 1
        handle = self.tree.lock(match, priority)
        request = Request(namespace, tokens, handle, priority, self.tree.pages(handle).tolist())
        assert len(request.row) == handle.num_pages
        request.computed = handle.num_pages * self.page_size
        self.requests.append(request)
        for prefix in self.kept(request):
            self.uses[prefix].hits += 1
            self.seen["hits"] += 1
        self.stamp(request)
        return request

    def compute(self, request: Request, count: int) -> bool:
        """Fill pages for ``count`` more elements, evicting for room; False if there is none."""
        elements = self.elements(request.tokens)
        end = min(request.computed + count, len(elements))
        wanted = -(-end // self.page_size) - len(request.row)
        if not self.make_room(wanted):
            return False
        request.row += self.allocator.allocate(wanted).tolist()
        for at in range(request.computed // self.page_size, len(request.row)):
            self.memory[request.row[at]] = (request.namespace, tuple(elements[: min(end, (at + 1) * self.page_size)]))
        request.computed = end
        return True

    def make_room(self, count: int) -> bool:
        """Evict what is missing."""
        missing = count - self.allocator.num_free
        if missing > self.tree.num_evictable:
            return False
        if missing > 0:
            self.evict(missing)
        return True

    def publish(self, request: Request) -> Published:
        """Give the tree the computed whole pages."""
        tokens = request.tokens[: request.computed + self.bigram]
        key, prefixes = self.tree.key(tokens), self.prefixes(request.namespace, tokens)
        pages = np.array(request.row[: len(prefixes)], dtype=np.int32)
        expected = [self.cached.get(prefix) for prefix in prefixes]
        old, node = request.handle.num_pages, request.handle.node
        published = self.tree.publish(request.handle, key, pages)
        self.seen["grown"] += old > 0 and node is request.handle.node and request.handle.num_pages > old
        known = [page for page in expected[old:] if page is not None]
        assert (published.first, published.pages.tolist()) == (old, known)
        assert published.duplicates.tolist() == request.row[old : old + len(known)]
        self.seen["duplicates"] += len(known)
        self.allocator.free(published.duplicates)
        request.row[old : old + len(known)] = published.pages.tolist()
        for prefix, page in zip(prefixes, request.row, strict=False):
            if prefix not in self.cached:
                self.cached[prefix] = page
                self.uses[prefix] = Use(0, self.tree.now, request.priority)
        assert request.handle.num_pages == len(prefixes)
        self.stamp(request)
        return published

    def leave(self, request: Request, *, publish: bool = True) -> None:
        """Finish, be retracted or aborted."""
        if publish:
            self.publish(request)
        self.stamp(request)
        self.tree.unlock(request.handle)
        self.requests.remove(request)
        self.allocator.free(np.array(request.row[request.handle.num_pages :], dtype=np.int32))

    def stamp(self, request: Request) -> None:
        """The slow way: note a use on every page of the path."""
        for prefix in self.kept(request):
            use = self.uses[prefix]
            use.last_used = self.tree.now
            use.priority = min(use.priority, request.priority)

    def evict(self, count: int) -> list[int]:
        """Evict and check that the tree took the right number of the right pages."""
        loose = self.loose()
        ends = {prefix for _, prefix in self.nodes()}
        # Prefixes are never used less than what continues them, but they are older; and the host keeps priorities.
        # s3fifo ranks by what has been evicted up to then.
        by_use = self.strategy_name not in ("fifo", "s3fifo") and not self.num_host_pages
        ranks = []
        if by_use or self.strategy_name == "lru":
            ranks = sorted(self.strategy.rank(self.uses[prefix]) for prefix in loose)
        pages = self.tree.evict(count).tolist()
        assert len(pages) == min(count, len(loose)), f"asked for {count} of {len(loose)}, got {len(pages)}"
        gone = [self.memory[page] for page in pages]
        assert set(gone) <= loose, "a page that a request needs was evicted"
        if ranks:
            assert sorted(self.strategy.rank(self.uses[prefix]) for prefix in gone) == ranks[: len(gone)]
        for prefix in gone:
            del self.cached[prefix], self.uses[prefix]
        self.apply_transfers()
        self.allocator.free(np.array(pages, dtype=np.int32))
        self.seen["evicted"] += len(pages)
        self.seen["partly"] += any(prefix not in ends for _, prefix in self.nodes())
        return pages

    def restore(self, request: Request) -> int:
        """Bring back what the host has, as far as there is room."""
        if not isinstance(self.tree, TieredTree):
            return 0
        key = self.tree.key(request.tokens[:-1])
        match = self.tree.match(key, request.namespace)
        if match.num_pages != request.handle.num_pages or len(request.row) != match.num_pages:
            return 0
        if not self.make_room(match.num_host_pages):
            return 0
        pages = self.allocator.allocate(match.num_host_pages)
        count = self.tree.restore(request.handle, key, pages)
        self.apply_transfers()
        self.allocator.free(pages[count:])
        for prefix, page in zip(self.kept(request)[-count:] if count else [], pages.tolist(), strict=False):
            self.cached[prefix] = page
            self.uses[prefix] = Use(0, self.tree.now, request.priority)
        request.row += pages[:count].tolist()
        request.computed = len(request.row) * self.page_size
        self.stamp(request)
        self.seen["restored"] += count
        return count

    def apply_transfers(self) -> None:
        """What the executor does."""
        for transfer in self.tree.drain_transfers() if isinstance(self.tree, TieredTree) else ():
            pairs = zip(transfer.device_pages.tolist(), transfer.host_pages.tolist(), strict=True)
            for device_page, host_page in pairs:
                if transfer.to_host:
                    self.host_memory[host_page] = self.memory[device_page]
                else:
                    self.memory[device_page] = self.host_memory[host_page]

    # ---- the truth --------------------------------------------------------------------------

    def loose(self) -> set[Prefix]:
        """Cached prefixes that no request keeps."""
        kept = {prefix for request in self.requests for prefix in self.kept(request)}
        return set(self.cached) - kept

    def nodes(self) -> Iterator[tuple[Node, Prefix]]:
        """Every node and the prefix that ends with it."""
        per_element = 2 if self.bigram else 1
        for namespace, root in self.tree._roots.items():
            stack: list[tuple[Node, tuple[object, ...]]] = [(root, ())]
            while stack:
                node, before = stack.pop()
                ids = page_indices(node.key).reshape(-1, per_element).tolist()
                after = before + tuple(tuple(pair) if self.bigram else pair[0] for pair in ids)
                stack += [(child, after) for child in node.children.values()]
                if node.parent is not None:
                    yield node, (namespace, after)

    def check(self) -> None:
        """The tree's own invariants, then everything it holds against the dict and the memory."""
        self.tree.check()
        self.allocator.check()
        owned = sum(len(request.row) - request.handle.num_pages for request in self.requests)
        assert self.allocator.num_free + self.tree.num_cached + owned == self.num_pages
        loose = self.loose()
        assert self.tree.num_evictable == len(loose)
        assert self.tree.num_protected == len(self.cached) - len(loose)
        for node, (namespace, elements) in self.nodes():
            num_pages = len(node.key) // self.tree.page_bytes
            for index in range(num_pages):
                end = len(elements) - (num_pages - 1 - index) * self.page_size
                prefix = (namespace, elements[:end])
                if node.pages:
                    page = int(page_indices(node.pages)[index])
                    assert self.cached[prefix] == page
                    assert self.memory[page] == prefix
                if node.host_pages:
                    assert self.host_memory[int(page_indices(node.host_pages)[index])] == prefix
                if node.place is not None and node.pages:
                    use = self.uses[prefix]
                    assert node.last_used == use.last_used
                    if not self.num_host_pages:  # The host joins nodes, whose hits and priorities become one.
                        assert (node.hits, node.priority) == (use.hits, use.priority)
        for request in self.requests:
            elements = self.elements(request.tokens)
            for index, page in enumerate(request.row):
                end = min((index + 1) * self.page_size, request.computed)
                assert self.memory[page] == (request.namespace, tuple(elements[:end])), "a row reads a stranger's page"
