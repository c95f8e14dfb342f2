"""Which of several tokenizers a request is with, and one step's tokens dealt out to them.

Owns: the requests that are not where their number says, how the columns of ``Tokens`` are cut.
Does not know: what a home is, which requests are open.
"""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.messages import Tokens

V = TypeVar("V")


class Router:
    """A request's home is its id modulo ``num_homes``, unless it was given another one."""

    def __init__(self, num_homes: int) -> None:
        self._num_homes = num_homes
        self._moved: dict[int, int] = {}

    def home(self, request_id: int) -> int:
        """Of a request."""
        return self._moved.get(request_id, request_id % self._num_homes)

    def move(self, request_id: int, home: int) -> None:
        """Give a request a home of its own choice, until ``forget``."""
        self._moved[request_id] = home

    def forget(self, request_id: int) -> None:
        """The request has ended; unknown ones are ignored."""
        self._moved.pop(request_id, None)

    def split(self, message: Tokens) -> list[tuple[int, Tokens]]:
        """Returns (home, its part) for every home that gets something; lines keep their order.

        Work per line is numpy's; Python's is per request that has more than a token."""
        if self._num_homes == 1:
            return [(0, message)]
        request_ids = np.frombuffer(message.request_ids, dtype=np.int64)
        token_ids = np.frombuffer(message.token_ids, dtype=np.int32)
        finishes = np.frombuffer(message.finishes, dtype=np.uint8)
        homes = self._homes(request_ids)
        parts = []
        for home in range(self._num_homes):
            lines = np.flatnonzero(homes == home)
            part = Tokens(
                request_ids[lines].tobytes(),
                token_ids[lines].tobytes(),
                finishes[lines].tobytes(),
                cached_tokens=self._of_home(home, message.cached_tokens),
                extras=self._of_home(home, message.extras),
            )
            if len(lines) or part.extras:
                parts.append((home, part))
        return parts

    def _homes(self, request_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        homes = request_ids % self._num_homes
        if self._moved:  # only while requests run that came when their home was away
            for line, request_id in enumerate(request_ids.tolist()):
                if (home := self._moved.get(request_id)) is not None:
                    homes[line] = home
        return homes

    def _of_home(self, home: int, by_request: Mapping[int, V]) -> dict[int, V]:
        return {request_id: one for request_id, one in by_request.items() if self.home(request_id) == home}
