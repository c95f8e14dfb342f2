"""What a request holds of the radix tree while it runs, and what it hears when it publishes.

Owns: plain records.  Does not know: how the tree makes them.
"""

from dataclasses import dataclass

import numpy as np

from engine.kv.node import Node
from engine.kv.pages import Pages

NO_PAGES: Pages = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Handle:
    """One request's lock.  num_pages: length of the prefix it keeps in the tree.  node: its end, None once unlocked."""

    node: Node | None
    num_pages: int
    priority: int


@dataclass(slots=True, eq=False)
class Published:
    """What a request must change: its pages from index ``first`` on are to be ``pages``; ``duplicates`` it may free."""

    first: int
    pages: Pages
    duplicates: Pages
