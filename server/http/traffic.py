"""What has passed through the HTTP server, as numbers.

Owns: counts of requests by route and status, of connections that were cut, and how long requests took.
Does not know: what reads the numbers.  Routes are patterns and statuses are few, so no client can make these grow.
"""

from collections import Counter
from typing import Literal

from engine.scheduling.meter import LONG_S, Distribution

Cut = Literal["too_many", "header_timeout", "write_timeout", "malformed"]


class Traffic:
    """Counts.  requests: (method, route, status) -> how many have ended.  refusals: error code -> how many.
    num_in_flight: requests being handled now."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Distribution] = {}
        self.refusals: Counter[str] = Counter()
        self.cuts: Counter[Cut] = Counter()
        self.num_connections = 0
        self.num_in_flight = 0

    def ended(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count a request that has had its response, or whose client has left."""
        self.requests[method if method in METHODS else "other", route, status] += 1
        durations = self.durations.get(route)
        if durations is None:
            durations = self.durations[route] = Distribution(LONG_S)
        durations.note(duration_s)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
