"""The KV store in the planner: sequences that wait for pages from it, and computed pages that go to it.

Owns: the requests to the executors, their answers, pages that the next step saves.
Does not know: the store, rows, the queue.
A sequence whose turn has come is held once before each start if the store may have more of its prefix than the cache.
The executors answer within the time limit, with the pages that they have by then; they keep these for the sequence
until it starts or ends.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from engine.features.kv_store.messages import NAME, FetchPages, Landing, PagesFetched, StoreMoves
from engine.features.kv_store.settings import StoreSettings
from engine.kv.node import Handle, Node
from engine.kv.pages import Pages
from engine.kv.radix import TOKEN_BYTES
from engine.messages import FeatureAnswer, FeatureRequest
from engine.plugins.features import FeatureContext
from engine.plugins.kinds import chosen_plugins
from engine.plugins.kv_store.kind import KV_STORE
from engine.scheduling.events import Why
from engine.scheduling.feature import NewFeature, PlannerFeature, PlannerParts
from engine.scheduling.rows import WORTH_WAITING_TOKENS, Sequence
from engine.scheduling.step_builder import StepBuilder

MOST_WAITING = 8  # enough to keep a store busy; sequences after them keep their places in the queue


@runtime_checkable
class TreeWithStates(Protocol):
    """A tree that also has states behind pages, each in a slot of the device.  num_to_take: states that may arrive."""

    @property
    def num_to_take(self) -> int: ...

    def arrive(self, handle: Handle, number: int) -> None:
        """Keep a state that arrives with the next step at a handle's end.  number: of what brings it."""
        ...


@dataclass(slots=True)
class _Fetch:
    """A request to every rank.

    num_pages: number of pages that all ranks have that have answered.
    states: as in ``PagesFetched``, those that all of these ranks have; None before the first answer.
    num_unanswered: number of ranks that have not answered."""

    fetch_id: int
    sequence: Sequence
    first_page: int
    num_pages: int
    num_unanswered: int
    states: set[int] | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages from the store that the executors keep: ``num_pages`` of a prompt, from its page ``first_page`` on."""

    fetch_id: int
    first_page: int
    num_pages: int


class StorePlanner(PlannerFeature):
    """The store in one planner.  timeout_s: how long a prompt waits for its pages."""

    def __init__(self, parts: PlannerParts, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._limits = parts.limits
        self._pages = parts.pages
        self._prefills = parts.prefills
        parts.pages.tree.new_pages, parts.pages.tree.new_state = self._note_new, self._note_state
        self._requested: list[FetchPages] = []
        self._waiting: dict[int, _Fetch] = {}  # by fetch
        self._answered: dict[int, Fetched] = {}  # by request
        self._landings: list[Landing] = []
        self._saves: list[tuple[bytes, bytes]] = []
        self._state_saves: list[tuple[bytes, int]] = []
        self._num_requested = 0

    # ---- pages that go to the store ---------------------------------------------------------

    def _note_new(self, node: Node, first_page: int, pages: Pages) -> None:
        """Save new pages of the tree.  Their content stays until the next step runs, even if they are freed before."""
        self._saves.append((b"".join(node.page_hashes[first_page:]), pages.tobytes()))

    def _note_state(self, node: Node, slot: int) -> None:
        """Save the new state at a node's end, which stays in its slot as pages stay."""
        self._state_saves.append((node.page_hashes[-1], slot))

    def attach(self, step: StepBuilder) -> None:
        """Add the saves and landings since the last step."""
        if not self._saves and not self._state_saves and not self._landings:
            return
        step.parts |= StoreMoves(
            save_hashes=b"".join(hashes for hashes, _ in self._saves),
            save_pages=b"".join(pages for _, pages in self._saves),
            save_slots=np.array([slot for _, slot in self._state_saves], dtype=np.int32).tobytes(),
            state_hashes=b"".join(page_hash for page_hash, _ in self._state_saves),
            landings=tuple(self._landings),
        ).part()
        step.filled_pages += [one.pages for one in self._landings]
        step.num_copied += sum(len(one.pages) for one in self._landings) // 4  # int32
        self._saves, self._state_saves, self._landings = [], [], []

    # ---- pages that come from the store -----------------------------------------------------

    def num_held(self) -> int:
        """Return the number of sequences that wait for the store."""
        return len(self._waiting)

    def blocks(self) -> bool:
        """Return whether no other sequence may wait now."""
        return len(self._waiting) >= MOST_WAITING

    def hold(self, sequence: Sequence) -> Why | None:
        """Request the pages of a sequence's prefix that the cache lacks, unless that was done."""
        if sequence.request_id in self._answered:
            return None
        first_page, parent, tokens = self._missing(sequence)
        if len(tokens) < WORTH_WAITING_TOKENS * TOKEN_BYTES:
            return None
        fetch_id = self._num_requested
        self._num_requested += 1
        num_pages = len(tokens) // (TOKEN_BYTES * self._limits.page_size)
        self._waiting[fetch_id] = _Fetch(fetch_id, sequence, first_page, num_pages, self._limits.num_ranks)
        self._requested.append(FetchPages(fetch_id=fetch_id, parent=parent, tokens=tokens, timeout_s=self._timeout_s))
        return "fetch"

    def _missing(self, sequence: Sequence) -> tuple[int, bytes, bytes]:
        """Return the first page that the cache lacks, the hash of the page before it, and the tokens from there on."""
        match = self._pages.match(sequence)
        first_page = match.num_cached
        tokens = match.key[first_page * self._limits.page_size * TOKEN_BYTES :]
        return first_page, match.last_hash() if tokens else b"", tokens

    def outgoing(self) -> list[FeatureRequest]:
        requested, self._requested = self._requested, []
        return [one.message() for one in requested]

    def received(self, message: FeatureAnswer) -> None:
        """Take one rank's answer.  The last one gives the sequence back to the queue."""
        if message.feature != NAME or (fetch := self._waiting.get(message.number)) is None:
            return  # the sequence has ended, or the executors that got the request are gone
        fetched = PagesFetched.of(message)
        fetch.num_pages = min(fetch.num_pages, fetched.num_pages)
        fetch.states = {*fetched.states} if fetch.states is None else fetch.states & {*fetched.states}
        fetch.num_unanswered -= 1
        if fetch.num_unanswered:
            return
        del self._waiting[fetch.fetch_id]
        num_pages = fetch.num_pages
        if isinstance(self._pages.tree, TreeWithStates):  # a row goes on from a state alone
            num_pages = max((one for one in fetch.states if one <= num_pages), default=0)
        self._answered[fetch.sequence.request_id] = Fetched(fetch.fetch_id, fetch.first_page, num_pages)
        self._prefills.wait(fetch.sequence)

    def adopt(self, sequence: Sequence, handle: Handle, key: bytes, pages: Pages) -> None:
        """Let the tree adopt the pages that were fetched, as far as they continue what the handle keeps."""
        if (fetched := self._answered.pop(sequence.request_id, None)) is None:
            return
        first, end = handle.num_pages, fetched.first_page + fetched.num_pages
        if not fetched.first_page <= first < end:
            self._drop(fetched.fetch_id)
            return
        tree, states = self._pages.tree, None
        if isinstance(tree, TreeWithStates):
            states = tree
            if not states.num_to_take:
                self._drop(fetched.fetch_id)
                return
        pages = pages[: end - first]
        num_saves, num_state_saves = len(self._saves), len(self._state_saves)
        end_of_key = (first + len(pages)) * tree.page_bytes
        published = tree.publish(handle, key[:end_of_key], np.concatenate((tree.pages(handle), pages)))
        assert handle.num_pages == first + len(pages)
        num_here = len(published.pages)  # the tree may have pages behind the last state
        pages[:num_here] = published.pages
        self._pages.allocator.free(published.duplicates)
        if states is not None:
            states.arrive(handle, fetched.fetch_id)
        del self._saves[num_saves:], self._state_saves[num_state_saves:]  # the store has these
        self._landings.append(
            Landing(
                fetch_id=fetched.fetch_id,
                first=first - fetched.first_page + num_here,
                pages=pages[num_here:].tobytes(),
                state=fetched.num_pages if states is not None else 0,
            )
        )

    def _drop(self, fetch_id: int) -> None:
        """Let the executors discard pages that were fetched or are on their way."""
        self._landings.append(Landing(fetch_id=fetch_id))

    def forget(self, sequence: Sequence) -> bool:
        if (fetched := self._answered.pop(sequence.request_id, None)) is not None:
            self._drop(fetched.fetch_id)
        for fetch in self._waiting.values():
            if fetch.sequence is sequence:
                del self._waiting[fetch.fetch_id]
                self._drop(fetch.fetch_id)
                return True
        return False

    def pages_lost(self) -> None:
        """Save nothing of what the next step would have saved."""
        self._saves.clear()
        self._state_saves.clear()

    def reset(self) -> list[Sequence]:
        sequences = [fetch.sequence for fetch in self._waiting.values()]
        self._waiting.clear()
        self._answered.clear()
        self._requested.clear()
        self._landings.clear()
        self.pages_lost()
        return sequences


def planner_feature(context: FeatureContext) -> NewFeature | None:
    """Return the builder of the feature; None if no store is configured."""
    is_on = KV_STORE in chosen_plugins(context.config)
    return partial(StorePlanner, timeout_s=StoreSettings.of(context.config).store_timeout_s) if is_on else None
