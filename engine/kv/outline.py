"""The radix tree as a picture: its most used parts, within a bound on the work whatever the tree's size.

Owns: which nodes are visited and shown.  Does not know: where the picture is shown, what the tokens mean.
The tree is entered from its roots, the most used node first.  Of a node's children only the oldest and the newest few
are visited: the oldest have survived eviction longest and are the shared prompts, the newest have just arrived.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec
import numpy as np

from engine.kv.node import Namespace, Node, Root, page_indices
from engine.kv.pages import Pages

FAN = 64  # children visited from either end of a node's list
MAX_VISITS = 1024
PREVIEW_TOKENS = 24
TOKEN_BYTES = 4


class OutlinedNode(msgspec.Struct, frozen=True):
    """One edge of the tree.

    parent: index of the node above in the same list, -1 for none.
    first_page: position of its part of the prefix.
    locks: requests that need it now, or whose path leads on through it.
    hits: requests that found their prefix here.
    idle_steps: steps planned since it was last used.
    num_children: number of its children, shown or not.
    namespace: a number for each namespace in the list.
    salted: requests share it only if they have its salt.
    first_tokens: int32 of the first few tokens of its own part.
    """

    parent: int
    first_page: int
    num_pages: int
    num_host_pages: int
    locks: int
    hits: int
    idle_steps: int
    num_children: int
    namespace: int
    salted: bool
    first_tokens: bytes


class Outline(msgspec.Struct, frozen=True):
    """A picture of a tree.  nodes: parents before their children.  complete: whether that is the whole tree."""

    nodes: tuple[OutlinedNode, ...] = ()
    complete: bool = True


def outline(
    roots: Iterable[Root], now: int, max_nodes: int, holders: Pages | None = None, *, stride: int = 1
) -> Outline:
    """Return at most ``max_nodes`` of a tree's nodes.

    now: the step being planned.  stride: number of tokens in an element of a key.
    holders: an entry per page of the pool; those of the nodes shown are set to the node's index."""
    frontier: list[tuple[tuple[int, ...], int, int, int, int, Node]] = []
    numbers: dict[Namespace, int] = {}
    complete, num_seen = True, 0

    def look_at(node: Node, index: int, first_page: int, namespace: int) -> None:
        nonlocal complete, num_seen
        children = list(_ends(node.children))
        complete = complete and len(children) == len(node.children)
        for child in children:
            num_seen += 1
            heat = (-child.hits, -child.locks, -child.num_pages)
            heapq.heappush(frontier, (heat, num_seen, index, first_page, namespace, child))

    # The newest namespaces first: eviction has forgotten an old one without recent use.
    for root in roots:
        if num_seen >= MAX_VISITS:
            complete = False
            break
        look_at(root, -1, 0, numbers.setdefault(root.namespace, len(numbers)))
    salted = [bool(namespace.cache_salt) for namespace in numbers]
    shown: list[OutlinedNode] = []
    while frontier and len(shown) < max_nodes:
        _, _, parent, first_page, namespace, node = heapq.heappop(frontier)
        num_pages = max(node.num_pages, node.num_host_pages)
        if holders is not None:
            holders[page_indices(node.pages)] = len(shown)
        shown.append(
            OutlinedNode(
                parent=parent,
                first_page=first_page,
                num_pages=node.num_pages,
                num_host_pages=node.num_host_pages,
                locks=node.locks,
                hits=node.hits,
                idle_steps=max(0, now - node.last_used),
                num_children=len(node.children),
                namespace=namespace,
                salted=salted[namespace],
                first_tokens=np.frombuffer(node.key[: PREVIEW_TOKENS * stride * TOKEN_BYTES], np.int32)[
                    ::stride
                ].tobytes(),
            )
        )
        if num_seen < MAX_VISITS:
            look_at(node, len(shown) - 1, first_page + num_pages, namespace)
        else:
            complete = complete and not node.children
    return Outline(tuple(shown), complete and not frontier)


def _ends(children: dict[bytes, Node]) -> Iterator[Node]:
    """Yield the oldest and the newest children."""
    if len(children) <= 2 * FAN:
        yield from children.values()
    else:
        yield from islice(children.values(), FAN)
        yield from islice(reversed(children.values()), FAN)
