"""The router's own gauges and counters, for /metrics.

Owns: names and help texts.  Does not know: what the replicas count, how answers become one.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.extensions.replicas.replicas import Replicas
from server.proxy.observation import ADDED_LABEL
from server.proxy.replica import State

OWN = "callboard_router_"


def routed(replicas: Replicas) -> Iterator[Metric]:
    """Give a router's own samples."""
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
