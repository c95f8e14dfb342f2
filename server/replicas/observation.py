"""GET /metrics, /stats and /load of a router: what every replica says, in one answer.

Owns: how answers become one: samples and rows get a ``replica`` of their own, counts are added up, pools and trees are
put one behind another.
Does not know: what is counted, what the page shows.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine.scheduling.board import FIRST_ROW
from engine.scheduling.meter import SPAN_S
from server.access import access
from server.http.replies import json_reply
from server.replicas.administration import Answer, ask_all
from server.replicas.replica import Group, Replicas, State, unavailable

OWN = "callboard_router_"
ADDED_LABEL = "replica"
# Of these the largest one counts, where others are added up.
LARGEST = frozenset({"latency", "stalled_s", "page_size"})


class Observation:
    """Handles all three.  own: gives what the router itself knows."""

    def __init__(self, replicas: Group, session: aiohttp.ClientSession, own: Callable[[], Iterable[Metric]]) -> None:
        self._replicas = replicas
        self._session = session
        self._own = own

    @access("operator")
    async def metrics(self, request: web.Request) -> web.Response:
        """Answer in the format that the scraper asks for: also where no replica answers."""
        told = await self._ask_all(request)
        registry = CollectorRegistry()
        texts = {name: body.decode() for name, body in told.items()}
        registry.register(_Samples([*self._own(), *labelled(texts, self._replicas.noun)]))
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    @access("operator")
    async def stats(self, request: web.Request) -> web.Response:
        """What all say, as one; each one's own is in ``replicas``.  Raises RequestError (503) if none answers."""
        told = {name: msgspec.json.decode(body) for name, body in (await self._ask_all(request)).items()}
        if not told:
            raise unavailable("no replica answers")
        response = json_reply({**added_up(told), "replicas": told})
        response.headers["Cache-Control"] = "no-store"
        return response

    async def _ask_all(self, request: web.Request) -> dict[str, bytes]:
        """Replica -> what it says; those that do not answer are left out."""
        answers = await ask_all(self._replicas, self._session, request)  # ``watch`` finds out why one does not answer
        return {one.name: told.body for one, told in answers if isinstance(told, Answer) and told.status == 200}


class _Samples(Collector):
    """Gives families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def routed(replicas: Replicas) -> Iterator[Metric]:
    """What a router knows."""
    ready = GaugeMetricFamily(OWN + "replica_ready", "Whether it takes requests.", labels=[ADDED_LABEL])
    num_open = GaugeMetricFamily(OWN + "replica_open_requests", "Sent and not ended.", labels=[ADDED_LABEL])
    sent = CounterMetricFamily(OWN + "replica_requests", "Sent to it.", labels=[ADDED_LABEL])
    lost = CounterMetricFamily(OWN + "replica_losses", "How often it was lost.", labels=[ADDED_LABEL])
    for one in replicas.all:
        ready.add_metric([one.name], one.state is State.READY)
        num_open.add_metric([one.name], one.num_open)
        sent.add_metric([one.name], one.num_sent)
        lost.add_metric([one.name], one.num_lost)
    yield from (ready, num_open, sent, lost)
    yield CounterMetricFamily(OWN + "requests", "Requests that found a replica.", value=replicas.num_requests)
    yield CounterMetricFamily(
        OWN + "requests_with_prefix", "Of these, where their prefix was.", value=replicas.num_with_prefix
    )
    yield CounterMetricFamily(OWN + "streams_resumed", "Streams that went on elsewhere.", value=replicas.num_resumed)


def labelled(texts: dict[str, str], label: str = ADDED_LABEL) -> list[Metric]:
    """The families of several expositions, each sample with the name of the one that it is from.

    texts: in Prometheus's text format, by name."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, label: name}, sample.value)
    return list(families.values())


def added_up(told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What several replicas say of themselves as one would say it.  told: /stats of each."""
    first = next(iter(told.values()))
    own = {"pool": _pool, "history": _history, "steps": _steps}
    whole = {
        key: own[key](told) if key in own else _joined(key, {name: body[key] for name, body in told.items()})
        for key in first
    }
    statuses = [body["status"] for body in told.values() if "status" in body]
    if "ready" in statuses:
        whole["status"] = "ready"
    return whole


def _joined(key: str, values: dict[str, Any]) -> Any:
    given = [value for value in values.values() if value is not None]
    match given[0] if given else None:
        case bool():
            return all(given)
        case int() | float():
            return max(given) if key in LARGEST else sum(given)
        case dict():
            inner = dict.fromkeys(inner for value in given for inner in value)
            passed = {one: key if key in LARGEST else one for one in inner}
            return {
                one: _joined(passed[one], {name: value.get(one) for name, value in values.items()}) for one in inner
            }
        case list():
            return _rows(values)
        case other:
            return other


def _rows(values: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rows, each with its replica; one that names its parent by place still does."""
    rows: list[dict[str, Any]] = []
    for name, given in values.items():
        num_before = len(rows)
        for row in given:
            parent = {"parent": row["parent"] + num_before} if row.get("parent", -1) >= 0 else {}
            rows.append({**row, **parent, ADDED_LABEL: name})
    return rows


def _pool(told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The cells of all pools, which mean rows and nodes where ``_rows`` has put them.

    Each replica numbers its evictions by itself, so only their sum is told."""
    pools = [body["pool"] for body in told.values()]
    runs, num_rows, num_nodes = [], 0, 0
    for body in told.values():
        for count, shown, node in body["pool"]["runs"]:
            runs.append((count, shown + num_rows * (shown >= FIRST_ROW), node + num_nodes * (node >= 0)))
        num_rows += len(body["board"])
        num_nodes += len(body["prefixes"])
    return {
        "pages": sum(one["pages"] for one in pools),
        "cell_pages": max(one["cell_pages"] for one in pools),
        "runs": runs,
        "evictions": sum(one["evictions"] for one in pools),
        "evicted": [],
    }


def _history(told: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Spans that ended at about the same time are one, with the mean of ``busy`` and the sums of all else."""
    spans: dict[int, dict[str, Any]] = {}
    for body in told.values():
        for span in body["history"]:
            given = {**span, "busy": span["busy"] / len(told)}
            number = math.floor(span["age_s"] / SPAN_S)
            if (whole := spans.setdefault(number, given)) is not given:
                age_s = max(whole["age_s"], given["age_s"])
                whole |= {name: whole[name] + given[name] for name in given} | {"age_s": age_s}
    return [spans[number] for number in sorted(spans, reverse=True)]


def _steps(told: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Oldest first."""
    return sorted(_rows({name: body["steps"] for name, body in told.items()}), key=lambda step: -step["age_s"])
