"""GET /metrics: everything that is counted, for Prometheus.

Owns: names, labels and help texts; under ``callboard_``, and once more those that dashboards, autoscalers and endpoint
pickers made for vLLM look for.  Does not know: how anything is counted.
Nothing is kept here: each scrape looks at the engine's counters once and turns them into samples.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engine.actors.admission import unavailable
from engine.actors.snapshot import Gauges, Snapshot
from engine.messages import Finish
from engine.scheduling.meter import Distribution, Meter
from server.backend import Backend, EngineIngress
from server.http.exchange import Traffic
from server.http.operation import operation

OWN = "callboard_"
VLLM = "vllm:"
More = Callable[[], Iterable[tuple[str, str, float]]]  # name, what it says, value
Collect = Callable[[Snapshot], Iterable[Metric]]
FINISHES = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}

# What is sampled of the engine.  The names are vLLM's without its prefix wherever it has the same thing, so that one
# table serves both; what has no such name is below, under ours alone.
COUNTERS: dict[str, tuple[str, Callable[[Meter], int]]] = {
    "prompt_tokens": ("Prompt tokens of requests that have started.", lambda meter: meter.num_prompt_tokens),
    "prompt_tokens_cached": ("Of these, found in the prefix cache.", lambda meter: meter.num_cached_tokens),
    "generation_tokens": ("Tokens sampled and kept.", lambda meter: meter.num_output_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda meter: meter.num_prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens found there.", lambda meter: meter.num_cached_tokens),
    "spec_decode_num_drafts": ("Proposals that a step has verified.", lambda meter: sum(meter.proposed_at[:1])),
    "spec_decode_num_draft_tokens": ("Tokens of these.", lambda meter: sum(meter.proposed_at)),
    "spec_decode_num_accepted_tokens": ("Of these, right ones.", lambda meter: sum(meter.accepted_at)),
    "num_preemptions": ("Requests that lost their pages to others.", lambda meter: meter.num_retractions),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[Meter], Distribution]]] = {
    "time_to_first_token_seconds": (
        "From a request's arrival at the scheduler to its first token.",
        lambda meter: meter.ttft_s,
    ),
    "inter_token_latency_seconds": ("Between two tokens of a request.", lambda meter: meter.itl_s),
    "request_time_per_output_token_seconds": (
        "Mean time between a request's tokens after the first.",
        lambda meter: meter.tpot_s,
    ),
    "e2e_request_latency_seconds": ("From a request's arrival at the scheduler to its end.", lambda meter: meter.e2e_s),
    "request_queue_time_seconds": ("Until the first step that computed some of it.", lambda meter: meter.queue_s),
    "request_prefill_time_seconds": (
        "From the first step that computed some of it to the first token.",
        lambda meter: meter.prefill_s,
    ),
    "request_decode_time_seconds": ("From a request's first token to its end.", lambda meter: meter.decode_s),
    "request_inference_time_seconds": (
        "From the first step that computed some of it to a request's end.",
        lambda meter: meter.inference_s,
    ),
    "request_prompt_tokens": ("Length of prompts.", lambda meter: meter.prompt_tokens),
    "request_generation_tokens": ("Length of outputs.", lambda meter: meter.output_tokens),
    "iteration_tokens_total": ("Tokens computed in a step.", lambda meter: meter.step_tokens),
}


class EngineCollector(Collector):
    """Samples of the engine.  seen: with its meter.  prefix: of the names.  labels: what every sample carries."""

    def __init__(self, seen: Snapshot, prefix: str, labels: dict[str, str]) -> None:
        self._seen = seen
        self._prefix = prefix
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Make the samples that other engines have as well."""
        gauges, meter = self._seen.gauges, self._seen.meter
        yield self._gauge("num_requests_running", "Requests in the batch.", gauges.num_running)
        yield self._gauge("num_requests_waiting", "Requests without a place in the batch.", gauges.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages that requests need, 0 to 1.", usage(gauges))
        if meter is None:
            return
        for name, (help_text, count) in COUNTERS.items():
            yield self._total(name, help_text, count(meter))
        by_position = [([str(position)], count) for position, count in enumerate(meter.accepted_at)]
        name, help_text = "spec_decode_num_accepted_tokens_per_pos", "Right tokens by their place in the proposal."
        yield self._counter(name, help_text, ["position"], by_position)
        ended = [([word], meter.num_ended[finish]) for finish, word in FINISHES.items()]
        yield self._counter("request_success", "Requests that have ended, by why.", ["finished_reason"], ended)
        for name, (help_text, distribution) in HISTOGRAMS.items():
            yield self._histogram(name, help_text, distribution(meter))

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, help_text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _total(self, name: str, help_text: str, count: float) -> Metric:
        return self._counter(name, help_text, [], [([], count)])

    def _counter(
        self, name: str, help_text: str, labels: list[str], samples: Iterable[tuple[list[str], float]]
    ) -> Metric:
        family = CounterMetricFamily(self._prefix + name, help_text, labels=self._names + labels)
        for values, count in samples:
            family.add_metric(self._values + values, count)
        return family

    def _histogram(self, name: str, help_text: str, distribution: Distribution) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, help_text, labels=self._names)
        family.add_metric(self._values, buckets(distribution), distribution.total)
        return family


class VllmCollector(EngineCollector):
    """The common samples under vLLM's names, and those that endpoint pickers of the Gateway API and llm-d read beside.

    collectors: of samples of other parts of the server."""

    def __init__(self, seen: Snapshot, model: str, collectors: Sequence[Collect]) -> None:
        super().__init__(seen, VLLM, {"model_name": model, "engine": "0"})
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        gauges = self._seen.gauges
        num_pages = gauges.pages_free + gauges.pages_cached + gauges.pages_used
        pool = {"block_size": str(gauges.page_size), "num_gpu_blocks": str(num_pages)}
        # Pickers from before vLLM 0.10.2 read it by this name.
        yield self._gauge("gpu_cache_usage_perc", "As kv_cache_usage_perc.", usage(gauges))
        yield self._info("cache_config_info", "The KV pool: tokens per page, and pages.", pool, 1)
        for collect in self._collectors:
            yield from collect(self._seen)

    def _info(self, name: str, help_text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(VLLM + name, help_text, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], value)
        return family


class OwnCollector(EngineCollector):
    """Samples that only this engine has, after the common ones.  about: labels of what is running.

    more: gauges of other parts of the server."""

    def __init__(
        self, seen: Snapshot, ingress: EngineIngress, traffic: Traffic, about: dict[str, str], more: Sequence[More] = ()
    ) -> None:
        super().__init__(seen, OWN, {})
        self._more = more
        self._ingress = ingress
        self._traffic = traffic
        self._about = about

    def collect(self) -> Iterator[Metric]:
        about = GaugeMetricFamily(OWN + "info", "What is running here.", labels=list(self._about))
        about.add_metric(list(self._about.values()), 1)
        yield about
        yield self._gauge("ready", "1 while requests are taken.", unavailable(self._ingress) is None)
        yield from super().collect()
        gauges, meter = self._seen.gauges, self._seen.meter
        yield from self._of_pages(gauges)
        yield self._gauge("num_requests_open", "Requests accepted and not yet ended.", gauges.num_open)
        yield self._gauge("steps_in_flight", "Steps planned and not yet completed.", gauges.num_in_flight)
        yield self._gauge("stalled_seconds", "How long no step has completed although requests run.", gauges.stalled_s)
        yield self._gauge("tasks", "Tasks on the event loop.", len(asyncio.all_tasks()))
        yield self._total("executor_restarts", "Times that all executors were started again.", gauges.num_restarts)
        yield self._gauge("tokenizers", "Tokenizers that take requests.", gauges.num_tokenizers)
        yield self._total(
            "tokenizer_restarts", "Times that a tokenizer process was started again.", gauges.num_tokenizer_restarts
        )
        yield self._total(
            "front_restarts", "Times that the frontend's process was started again.", gauges.num_front_restarts
        )
        yield self._total("late_events", "Output for clients that had left.", gauges.num_late_events)
        yield from self._of_mailboxes(gauges)
        if meter is not None:
            yield from self._of_steps(meter)
        for gauges_of in self._more:
            for name, help_text, value in gauges_of():
                yield self._gauge(name, help_text, value)
        yield from self._of_http()

    def _of_pages(self, gauges: Gauges) -> Iterator[Metric]:
        pages = GaugeMetricFamily(OWN + "kv_pages", "Pages of the KV pool by state.", labels=["state"])
        pages.add_metric(["free"], gauges.pages_free)
        pages.add_metric(["cached"], gauges.pages_cached)
        pages.add_metric(["used"], gauges.pages_used)
        yield pages
        num_on_host = gauges.of_features.get("host_pages_used", 0)
        yield self._gauge("kv_host_pages_used", "Pages of the host tier that hold something.", num_on_host)
        if (num_snapshots := gauges.of_features.get("state_snapshots")) is not None:
            yield self._gauge("state_snapshots", "Snapshots of recurrent states of cached prefixes.", num_snapshots)
            num_tokens = gauges.of_features["tokens_without_state"]
            yield self._gauge("tokens_without_state", "Cached tokens computed again for want of a state.", num_tokens)
        if (num_encoded := gauges.of_features.get("pictures_encoded")) is not None:
            yield self._total("pictures_encoded", "Pictures encoded for prompts.", num_encoded)
            yield self._total("pictures_found", "Pictures found encoded.", gauges.of_features["pictures_found"])
        yield self._gauge("kv_page_tokens", "Tokens per page.", gauges.page_size)

    def _of_mailboxes(self, gauges: Gauges) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(OWN + "mailbox_messages", "Not handled yet.", labels=["actor"])
        peak = GaugeMetricFamily(OWN + "mailbox_peak_messages", "Most handed over at once.", labels=["actor"])
        for box in gauges.mailboxes:
            waiting.add_metric([box.name], box.waiting)
            peak.add_metric([box.name], box.peak)
        yield waiting
        yield peak

    def _of_steps(self, meter: Meter) -> Iterator[Metric]:
        yield self._total("steps", "Steps completed.", meter.num_steps)
        yield self._histogram("step_duration_seconds", "From when the device was free for it.", meter.step_s)
        age = max(0.0, self._seen.now - meter.last_completed_at)
        yield self._gauge("last_step_age_seconds", "Since the last step completed, or counting began.", age)

    def _of_http(self) -> Iterator[Metric]:
        traffic = self._traffic
        yield self._gauge("http_connections", "Open connections.", traffic.num_connections)
        yield self._gauge("http_requests_in_flight", "Requests being handled.", traffic.num_in_flight)
        ended = [([method, route, str(status)], float(n)) for (method, route, status), n in traffic.requests.items()]
        yield self._counter("http_requests", "Requests that have ended.", ["method", "route", "status"], ended)
        refused = [([code], float(count)) for code, count in traffic.refusals.items()]
        yield self._counter("admission_rejections", "Requests refused for now, by error code.", ["reason"], refused)
        cut = [([str(reason)], float(count)) for reason, count in traffic.cuts.items()]
        yield self._counter("http_connections_cut", "Connections ended by the server.", ["reason"], cut)
        durations = HistogramMetricFamily(
            OWN + "http_request_duration_seconds", "From a request's header to its response's end.", labels=["route"]
        )
        for route, distribution in traffic.durations.items():
            durations.add_metric([route], buckets(distribution), distribution.total)
        yield durations


class MetricsRoute:
    """Handles GET /metrics.  more: see ``OwnCollector``.  collectors: see ``VllmCollector``."""

    def __init__(
        self,
        backend: Backend,
        traffic: Traffic,
        *,
        version: str,
        more: Sequence[More] = (),
        collectors: Sequence[Collect] = (),
    ) -> None:
        self._collectors = collectors
        self._more = more
        self._ingress, self._monitor = backend.ingress, backend.monitor
        self._traffic = traffic
        self._about = {"version": version, "model_name": backend.card.name}
        self._process = ProcessCollector(registry=None)

    @operation("GET", "/metrics", "operator", polled=True)
    async def get(self, request: web.Request) -> web.Response:
        """Answer in the format that the scraper asks for."""
        seen = await self._monitor.look(meter=True)
        registry = CollectorRegistry()
        registry.register(self._process)
        if seen.gauges.process not in (0, os.getpid()):
            ProcessCollector(f"{OWN}engine", pid=lambda: str(seen.gauges.process), registry=registry)
        registry.register(OwnCollector(seen, self._ingress, self._traffic, self._about, self._more))
        registry.register(VllmCollector(seen, self._about["model_name"], self._collectors))
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})


def usage(gauges: Gauges) -> float:
    """Returns the share of the pages that requests need; cached ones count as free, since they can be had at once."""
    total = gauges.pages_free + gauges.pages_cached + gauges.pages_used
    return gauges.pages_used / total if total else 0.0


def buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Returns the cumulated counts of a distribution's buckets, as Prometheus wants them."""
    cumulated, entries = 0, []
    for edge, count in zip((*distribution.edges, float("inf")), distribution.counts, strict=True):
        cumulated += count
        entries.append(("+Inf" if edge == float("inf") else repr(edge), float(cumulated)))
    return entries
