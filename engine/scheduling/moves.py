"""Pages that move between the tiers: what the next step is to copy before it runs.

Owns: where fetched pages land, and how all moves are told in a step.
Does not know: who holds which page, when a page leaves a tier (the tree does), queues.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from engine.kv.node import Handle
from engine.kv.pages import Pages
from engine.kv.radix import RadixTree
from engine.messages import Landing, Step


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages from the store that the executors keep: ``num_pages`` of a prompt, from its page ``first_page`` on."""

    fetch_id: int
    first_page: int
    num_pages: int


class PageMoves:
    """Of one tree's pages."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._landings: list[Landing] = []

    def land(self, handle: Handle, key: bytes, fetched: Fetched, pages: Pages) -> None:
        """Use what was fetched, as far as it continues what the handle keeps.  pages: free ones, behind those."""
        first, end = handle.num_pages, fetched.first_page + fetched.num_pages
        if not fetched.first_page <= first < end:
            self.let_go(fetched.fetch_id)
            return
        pages = pages[: end - first]
        self._tree.adopt(handle, key, pages)
        self._landings.append(Landing(fetched.fetch_id, first - fetched.first_page, pages.tobytes()))

    def let_go(self, fetch_id: int) -> None:
        """Nobody wants what was fetched, or is being fetched, any more."""
        self._landings.append(Landing(fetch_id))

    def forget(self) -> None:
        """The executors are gone, with all that they kept."""
        self._landings.clear()

    def added_to(self, step: Step) -> Step:
        """The step, with every move since the last one."""
        if transfers := self._tree.drain_transfers():
            directions = [np.full(len(one.host_pages), one.to_host, dtype=np.int32) for one in transfers]
            step = msgspec.structs.replace(
                step,
                transfer_to_host=np.concatenate(directions).tobytes(),
                transfer_device_pages=np.concatenate([one.device_pages for one in transfers]).tobytes(),
                transfer_host_pages=np.concatenate([one.host_pages for one in transfers]).tobytes(),
            )
        if saves := self._tree.drain_saves():
            step = msgspec.structs.replace(
                step,
                save_hashes=b"".join(hashes for hashes, _ in saves),
                save_pages=b"".join(pages.tobytes() for _, pages in saves),
            )
        if self._landings:
            step = msgspec.structs.replace(step, landings=tuple(self._landings))
            self._landings.clear()
        return step
