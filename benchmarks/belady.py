"""Belady's cache, which knows the future: it evicts the page whose next use is furthest.

Owns: that order.  Does not know: what a page holds, time.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence


def most_found(prompts: Sequence[Sequence[bytes]], findable: Sequence[int], num_pages: int) -> list[int]:
    """How many pages each prompt finds in such a cache, for one request at a time.

    prompts: the names of each request's pages, with those of its answer.  findable: how many of them it may find."""
    uses: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for index, (pages, most) in enumerate(zip(prompts, findable, strict=True)):
        for page in pages[:most]:
            uses[page].append(index)
    cached: dict[bytes, int] = {}  # page -> its next use
    furthest: list[tuple[int, int, bytes]] = []  # a heap: next use, then place in its prompt, both from the last on
    counts = []
    for index, (pages, most) in enumerate(zip(prompts, findable, strict=True)):
        counts.append(next((at for at, page in enumerate(pages[:most]) if page not in cached), min(most, len(pages))))
        for place, page in enumerate(pages):
            while uses[page] and uses[page][0] <= index:
                uses[page].popleft()
            cached[page] = uses[page][0] if uses[page] else len(prompts)
            heapq.heappush(furthest, (-cached[page], -place, page))
        while len(cached) > num_pages:
            negative, _, page = heapq.heappop(furthest)
            if cached.get(page) == -negative:
                del cached[page]
    return counts
