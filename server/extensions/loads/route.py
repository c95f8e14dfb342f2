"""GET /v1/loads: how busy the engine is, in the form in which SGLang's routers read it.

Owns: the shape of the JSON.  Does not know: how the gauges are counted.
"""

from datetime import UTC, datetime

import msgspec
from aiohttp import web

from engine.actors.snapshot import Gauges
from engine.types.errors import RequestError
from server.backend import EngineMonitor
from server.http.operation import operation
from server.http.replies import json_reply


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine.  token_usage: the part of the pool that running requests hold; cached pages are free.

    utilization: running requests as a part of the most."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    utilization: float
    max_running_requests: int

    @classmethod
    def of(cls, gauges: Gauges) -> "RankLoad":
        """Return the load that gauges show."""
        num_pages = gauges.pages_free + gauges.pages_cached + gauges.pages_used
        return cls(
            num_running_reqs=gauges.num_running,
            num_waiting_reqs=gauges.num_waiting,
            num_used_tokens=gauges.pages_used * gauges.page_size,
            max_total_num_tokens=num_pages * gauges.page_size,
            token_usage=round(gauges.pages_used / max(num_pages, 1), 4),
            utilization=round(gauges.num_running / max(gauges.max_running, 1), 4),
            max_running_requests=gauges.max_running,
        )


class LoadTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over all ranks, of which there is one."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_utilization: float


class LoadsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The load by rank, and in all.  timestamp: of now, as ISO 8601."""

    timestamp: str
    version: str
    dp_rank_count: int = 1
    loads: list[RankLoad]
    aggregate: LoadTotals


async def refuse_loads(request: web.Request) -> web.StreamResponse:
    """Answer where several engines are behind one address.  Raises RequestError: 404."""
    reason = "several engines are behind this address; ask each, or /load for the number of all requests"
    raise RequestError(reason, status=404, code="not_one_engine")


class LoadsRoute:
    """Handles the route."""

    def __init__(self, monitor: EngineMonitor, version: str) -> None:
        self._monitor = monitor
        self._version = version

    @operation(
        "GET", "/v1/loads", "operator", "How busy the engine is.", answer=LoadsBody, polled=True, off=refuse_loads
    )
    async def get(self, request: web.Request) -> web.Response:
        """Return the load of now."""
        load = RankLoad.of((await self._monitor.look()).gauges)
        return json_reply(
            LoadsBody(
                timestamp=datetime.now(UTC).isoformat(),
                version=self._version,
                loads=[load],
                aggregate=LoadTotals(
                    total_running_reqs=load.num_running_reqs,
                    total_waiting_reqs=load.num_waiting_reqs,
                    total_reqs=load.num_running_reqs + load.num_waiting_reqs,
                    avg_token_usage=load.token_usage,
                    avg_utilization=load.utilization,
                ),
            )
        )
