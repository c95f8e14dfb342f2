"""GET /stats: the same numbers as /metrics for a person's page, with the last steps, the prefix cache and the board.

Owns: the shape of that JSON, its bounds, rates over the last seconds.  Does not know: how anything is counted, HTML;
what of a request its viewer may see (``board.py``).
What cached prefixes say is shown only without an API key, where all clients are one person, and only of those that were
not salted.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from aiohttp import web

from engine.kv.outline import OutlinedNode
from engine.messages import Finish
from engine.scheduling.meter import Distribution, Meter, StepRecord
from server.backend import Backend
from server.clients import Clients
from server.http.exchange import EXCHANGE
from server.http.operation import operation
from server.http.replies import json_reply
from server.operators.board import PoolBody, RowBody, SpanBody, history, pool, rows
from server.operators.status import trouble

MAX_PREVIEW_CHARS = 60
RATE_WINDOW_S = 5.0


class StepBody(msgspec.Struct, frozen=True):
    """A step: ended ``age_s`` ago and took ``seconds``."""

    id: int
    age_s: float
    seconds: float
    decodes: int
    prefills: int
    prefill_tokens: int


class NodeBody(msgspec.Struct, frozen=True):
    """A part of a cached prefix, see ``engine/kv/outline.py``.  text: how it begins, where that may be shown."""

    parent: int
    first_token: int
    tokens: int
    host_tokens: int
    locks: int
    hits: int
    idle_steps: int
    children: int
    namespace: int
    salted: bool
    text: str | None


class MailboxBody(msgspec.Struct, frozen=True):
    """An actor's queue.  taken: messages so far, 0 where they are counted in another process."""

    name: str
    waiting: int
    peak: int
    capacity: int
    taken: int


class QuantilesBody(msgspec.Struct, frozen=True):
    """Seconds, interpolated within buckets; None before there was anything."""

    p50: float | None
    p90: float | None
    p99: float | None


class StatsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that the page shows.  status: 'ready', or the code of the error that /ready gives.  loading: what a
    start does right now.

    Token counts only grow; rates are over the last seconds that had steps.  board: requests, oldest first, with
    ``board_hidden`` others behind them.  history: minutes, as far as something ran in them."""

    status: str
    loading: str
    model: str
    about: str
    version: str
    requests: dict[str, int]
    ended: dict[str, int]
    tokens: dict[str, int]
    tokens_per_s: dict[str, float]
    pages: dict[str, int]
    latency: dict[str, QuantilesBody]
    mailboxes: list[MailboxBody]
    steps: list[StepBody]
    steps_in_flight: int
    history: list[SpanBody]
    board: list[RowBody]
    board_hidden: int
    pool: PoolBody
    prefixes: list[NodeBody]
    prefixes_complete: bool
    restarts: int
    tokenizers: int
    tokenizer_restarts: int
    front_restarts: int
    retractions: int
    stalled_s: float


class StatsRoute:
    """Handles GET /stats.  shows_text: whether every viewer may see parts of what is cached."""

    def __init__(self, backend: Backend, clients: Clients, *, version: str, shows_text: bool) -> None:
        self._clients = clients
        self._ingress, self._monitor, self._model = backend.ingress, backend.monitor, backend.card.name
        self._about = backend.card.about
        self._version = version
        self._shows_text = shows_text

    @operation("GET", "/stats", "operator", polled=True)
    async def get(self, request: web.Request) -> web.Response:
        """Answer within a few milliseconds, whatever the engine holds."""
        seen = await self._monitor.look(meter=True, board=True)
        now, gauges, meter, board = seen.now, seen.gauges, seen.meter, seen.board
        steps = meter.recent_steps if meter is not None else []
        error = trouble(self._ingress, gauges)
        body = StatsBody(
            status=error.code if error is not None else "ready",
            loading=self._ingress.loading() if not self._ingress.ready else "",
            model=self._model,
            about=self._about,
            version=self._version,
            requests={
                "open": gauges.num_open,
                "running": gauges.num_running,
                "waiting": gauges.num_waiting,
                "max_running": gauges.max_running,
            },
            ended={finish.name.lower(): meter.num_ended[finish] for finish in Finish if finish} if meter else {},
            tokens=_tokens(meter),
            tokens_per_s=rates(steps, now),
            pages={
                "free": gauges.pages_free,
                "cached": gauges.pages_cached,
                "used": gauges.pages_used,
                "host_used": gauges.of_features.get("host_pages_used", 0),
                "page_size": gauges.page_size,
            },
            latency=_latency(meter),
            mailboxes=[
                MailboxBody(box.name, box.waiting, box.peak, box.capacity, box.num_taken) for box in gauges.mailboxes
            ],
            steps=[
                StepBody(
                    id=step.step_id,
                    age_s=round(now - step.completed_at, 6),
                    seconds=round(step.completed_at - step.began_at, 6),
                    decodes=step.num_decodes,
                    prefills=step.num_prefills,
                    prefill_tokens=step.num_prefill_tokens,
                )
                for step in steps
            ],
            steps_in_flight=gauges.num_in_flight,
            history=history(meter.history, now) if meter else [],
            board=rows(board, self._clients.of(request[EXCHANGE].key), self._monitor.decode),
            board_hidden=board.num_hidden,
            pool=pool(board),
            prefixes=[self._node(node, gauges.page_size) for node in board.outline.nodes],
            prefixes_complete=board.outline.complete,
            restarts=gauges.num_restarts,
            tokenizers=gauges.num_tokenizers,
            tokenizer_restarts=gauges.num_tokenizer_restarts,
            front_restarts=gauges.num_front_restarts,
            retractions=meter.num_retractions if meter else 0,
            stalled_s=round(gauges.stalled_s, 3),
        )
        response = json_reply(body)
        response.headers["Cache-Control"] = "no-store"
        return response

    def _node(self, node: OutlinedNode, page_size: int) -> NodeBody:
        text = None
        if self._shows_text and not node.salted:
            ids = np.frombuffer(node.first_tokens, dtype=np.int32).tolist()
            text = self._monitor.decode(ids)[:MAX_PREVIEW_CHARS]
        return NodeBody(
            parent=node.parent,
            first_token=node.first_page * page_size,
            tokens=node.num_pages * page_size,
            host_tokens=node.num_host_pages * page_size,
            locks=node.locks,
            hits=node.hits,
            idle_steps=node.idle_steps,
            children=node.num_children,
            namespace=node.namespace,
            salted=node.salted,
            text=text,
        )


def rates(steps: Sequence[StepRecord], now: float) -> dict[str, float]:
    """Returns tokens per second over the last seconds, as far back as the record goes."""
    recent = [step for step in steps if step.completed_at > now - RATE_WINDOW_S]
    if not recent:
        return {"decode": 0.0, "prefill": 0.0}
    # A record that is full reaches back less far than the window; a young one is not stretched to it.
    covered_s = max(now - recent[0].began_at, 1e-3) if len(recent) == len(steps) else RATE_WINDOW_S
    decoded = sum(step.num_decodes for step in recent)
    prefilled = sum(step.num_prefill_tokens for step in recent)
    return {"decode": round(decoded / covered_s, 1), "prefill": round(prefilled / covered_s, 1)}


def quantile(distribution: Distribution, share: float) -> float | None:
    """Returns the size below which ``share`` of all are, interpolated within its bucket."""
    left = distribution.num_seen * share
    if not left:
        return None
    low = 0.0
    for edge, count in zip(distribution.edges, distribution.counts, strict=False):
        if count and left <= count:
            return low + (edge - low) * left / count
        left -= count
        low = edge
    return low


def _tokens(meter: Meter | None) -> dict[str, int]:
    if meter is None:
        return {}
    return {
        "prompt": meter.num_prompt_tokens,
        "cached": meter.num_cached_tokens,
        "output": meter.num_output_tokens,
        "proposed": sum(meter.proposed_at),
        "accepted": sum(meter.accepted_at),
    }


def _latency(meter: Meter | None) -> dict[str, QuantilesBody]:
    if meter is None:
        return {}
    distributions = {
        "ttft": meter.ttft_s,
        "itl": meter.itl_s,
        "tpot": meter.tpot_s,
        "queue": meter.queue_s,
        "e2e": meter.e2e_s,
        "step": meter.step_s,
    }
    return {
        name: QuantilesBody(*(quantile(one, share) for share in (0.5, 0.9, 0.99)))
        for name, one in distributions.items()
    }
