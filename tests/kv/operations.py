"""What a scheduler may do next to a tree, as functions of a model and a ``choose(n)`` that picks a number below n."""

from collections.abc import Callable

import numpy as np

from engine.features.host_tier.tree import TieredTree
from engine.kv.match import Match
from engine.kv.node import SHARED, Namespace
from tests.kv.cache_model import CacheModel, Request

Choose = Callable[[int], int]

STEMS = np.random.default_rng(1).integers(0, 3, (2, 200)).astype(np.int32)
TAILS = np.random.default_rng(2).integers(0, 2, (2, 200)).astype(np.int32)
NAMESPACES = (SHARED, SHARED, SHARED, Namespace(cache_salt="a"), Namespace(adapter="a"))
MOST_REQUESTS = 4


class Operations:
    """Operations on one model."""

    def __init__(self, model: CacheModel) -> None:
        self.model = model
        self.matches: list[tuple[np.ndarray, Namespace, Match]] = []

    def prompt(self, choose: Choose) -> tuple[np.ndarray, Namespace]:
        """Cuts one token before, at and after the end of a page are the ones that go wrong."""
        size = self.model.page_size
        stem = STEMS[choose(2), : max(0, choose(4) * size + choose(3) - 1)]
        tail = TAILS[choose(2), : 2 + choose(2 * size)]
        return np.concatenate((stem, tail)), NAMESPACES[choose(5)]

    def request(self, choose: Choose) -> Request | None:
        """One that runs."""
        requests = self.model.requests
        return requests[choose(len(requests))] if requests else None

    def admit(self, choose: Choose) -> None:
        """Lock what is cached, and restore what the host has."""
        if len(self.model.requests) < MOST_REQUESTS:
            request = self.model.admit(*self.prompt(choose), priority=choose(3) - 1)
            if choose(4):
                self.model.restore(request)

    def admit_twins(self, choose: Choose) -> None:
        """Two requests with one prompt in one step, both a chunk on."""
        if len(self.model.requests) + 2 <= MOST_REQUESTS:
            tokens, namespace = self.prompt(choose)
            twins = [self.model.admit(tokens, namespace) for _ in range(2)]
            count = 1 + choose(len(tokens))
            if all(self.model.compute(twin, count) for twin in twins):
                for twin in twins:
                    self.model.publish(twin)

    def run_through(self, choose: Choose) -> None:
        """A request that needs one step."""
        request = self.model.admit(*self.prompt(choose))
        self.model.leave(request, publish=self.model.compute(request, 1000))

    def look(self, choose: Choose) -> None:
        """Match, and remember the match for later."""
        tokens, namespace = self.prompt(choose)
        self.matches.append((tokens, namespace, self.model.look(tokens, namespace)))

    def admit_by_an_old_match(self, choose: Choose) -> None:
        """Lock by a match that the tree may have outgrown."""
        if self.matches and len(self.model.requests) < MOST_REQUESTS:
            tokens, namespace, match = self.matches.pop(choose(len(self.matches)))
            self.model.admit(tokens, namespace, match=match)

    def chunk(self, choose: Choose) -> None:
        """Compute some tokens and publish them."""
        if (request := self.request(choose)) is not None:
            self.model.compute(request, 1 + choose(2 * self.model.page_size))
            self.model.publish(request)

    def compute(self, choose: Choose) -> None:
        """Compute some tokens and keep them."""
        if (request := self.request(choose)) is not None:
            self.model.compute(request, 1 + choose(2 * self.model.page_size))

    def decode(self, choose: Choose) -> None:
        """The output grows."""
        if (request := self.request(choose)) is not None:
            request.tokens = np.append(request.tokens, TAILS[choose(2), : 1 + choose(self.model.page_size)])

    def leave(self, choose: Choose) -> None:
        """Finish or be retracted; seldom, be aborted."""
        if (request := self.request(choose)) is not None:
            self.model.leave(request, publish=choose(4) > 0)

    def evict(self, choose: Choose) -> None:
        """Somebody needs pages."""
        self.model.evict(1 + choose(6))

    def step(self, choose: Choose) -> None:
        """Time goes on."""
        self.model.tree.now += 1

    def finish(self) -> None:
        """Nothing is left behind: everything can be evicted once the requests are gone."""
        for request in list(self.model.requests):
            self.model.leave(request, publish=False)
        self.model.evict(self.model.num_pages)
        self.model.check()
        assert self.model.allocator.num_free == self.model.num_pages
        tree = self.model.tree
        if not (isinstance(tree, TieredTree) and tree.host.num_used):
            assert not tree._roots, "a namespace without pages is remembered"


NAMES = [name for name, value in vars(Operations).items() if callable(value) and name[0] != "_"]
NAMES = [name for name in NAMES if name not in ("prompt", "request", "finish")]
