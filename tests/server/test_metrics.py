"""The samples of /metrics, read back by Prometheus' own parser, and that it agrees with what happened."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Finish
from engine.settings.sections import LimitsSection, ServerSection
from engine.types.params import SamplingParams
from server.operators.metrics import COUNTERS, HISTOGRAMS
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, ask
from tests.server.live_server import MODEL, LiveServer

COMPLETION = {"model": MODEL, "prompt": "p"}
# What the dashboards in vLLM's repository and the Gateway API's endpoint picker read.
DASHBOARD = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(live: LiveServer) -> Samples:
    reply = ask(live.port, "GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def busy() -> Iterator[LiveServer]:
    """After two steps and a request."""
    with LiveServer() as live:

        def run() -> None:
            live.monitor.run(seconds=0.04, decodes=3, prefill_tokens=100)
            live.monitor.run(seconds=0.008, decodes=4)
            live.monitor.end(ttft_s=0.2)
            live.monitor.end(finish=Finish.LENGTH, ttft_s=30.0)
            assert live.monitor.meter is not None
            live.monitor.meter.verified(3, 2)
            live.monitor.meter.verified(2, 0)
            live.monitor.now += 2.0

        live.call(run)
        yield live


def test_counters_and_gauges_are_the_engines(busy: LiveServer) -> None:
    samples = scrape(busy)
    assert one(samples, "callboard_num_requests_running") == 3
    assert one(samples, "callboard_num_requests_waiting") == 2
    assert one(samples, "callboard_kv_cache_usage_perc") == 0.2
    assert [one(samples, "callboard_kv_pages", state=state) for state in ("free", "cached", "used")] == [50, 30, 20]
    assert one(samples, "callboard_prompt_tokens_total") == 80
    assert one(samples, "callboard_prefix_cache_hits_total") == 32
    assert one(samples, "callboard_generation_tokens_total") == 7
    assert one(samples, "callboard_steps_total") == 2
    assert one(samples, "callboard_spec_decode_num_drafts_total") == 2
    assert one(samples, "callboard_spec_decode_num_draft_tokens_total") == 5
    per_position = "callboard_spec_decode_num_accepted_tokens_per_pos_total"
    assert [one(samples, per_position, position=str(place)) for place in range(3)] == [1, 1, 0]
    assert one(samples, "callboard_request_success_total", finished_reason="length") == 1
    assert one(samples, "callboard_last_step_age_seconds") == 2.0
    assert one(samples, "callboard_mailbox_peak_messages", actor="scheduler") == 7
    assert one(samples, "callboard_ready") == 1
    assert any(name == "callboard_info" and ("model_name", MODEL) in labels for name, labels in samples)
    assert one(samples, "process_resident_memory_bytes") > 1e6


def test_histograms_cumulate_and_a_step_counts_once_for_each_of_its_tokens(busy: LiveServer) -> None:
    samples = scrape(busy)
    name = "callboard_inter_token_latency_seconds"
    assert one(samples, f"{name}_count") == 7
    assert one(samples, f"{name}_sum") == pytest.approx(3 * 0.04 + 4 * 0.008)
    assert one(samples, f"{name}_bucket", le="0.005") == 0
    assert one(samples, f"{name}_bucket", le="0.01") == 4
    assert one(samples, f"{name}_bucket", le="0.05") == 7
    assert one(samples, "callboard_time_to_first_token_seconds_bucket", le="20.0") == 1
    assert one(samples, "callboard_time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert one(samples, "callboard_iteration_tokens_total_sum") == 107
    for histogram in HISTOGRAMS:
        counts = [(float(dict(labels)["le"]), value) for (sample, labels), value in samples.items()
                  if sample == f"callboard_{histogram}_bucket"]  # fmt: skip
        assert [value for _, value in sorted(counts)] == sorted(value for _, value in counts), histogram


def test_vllms_names_are_there_with_its_labels(busy: LiveServer) -> None:
    samples = scrape(busy)
    labels = {"model_name": MODEL, "engine": "0"}
    found = {name for name, _ in samples}
    assert set(DASHBOARD) <= found
    for name in COUNTERS:
        assert one(samples, f"vllm:{name}_total", **labels) == one(samples, f"callboard_{name}_total")
    assert one(samples, "vllm:num_requests_running", **labels) == 3


def test_an_endpoint_picker_reads_the_pool() -> None:
    with LiveServer() as live:
        samples = {name: dict(labels) for name, labels in scrape(live)}
    labels = {"model_name": MODEL, "engine": "0"}
    assert samples["vllm:cache_config_info"] == {**labels, "block_size": "16", "num_gpu_blocks": "100"}


def test_a_server_whose_model_loads_can_be_scraped() -> None:
    with LiveServer() as live:
        live.ingress.ready, live.monitor.meter = False, None
        samples = scrape(live)
        assert one(samples, "callboard_ready") == 0
        assert one(samples, "callboard_num_requests_running") == 3


def test_requests_are_counted_by_route_and_never_by_what_clients_make_up() -> None:
    with LiveServer() as live:
        ask(live.port, "POST", "/v1/completions", COMPLETION)
        ask(live.port, "POST", "/v1/completions", {})
        for number in range(20):
            ask(live.port, "GET", f"/nowhere/{number}")
            ask(live.port, ("PROPFIND", "MKCOL")[number % 2], "/nowhere")
        samples = scrape(live)
        route = "/v1/completions"
        assert one(samples, "callboard_http_requests_total", method="POST", route=route, status="200") == 1
        assert one(samples, "callboard_http_requests_total", method="POST", route=route, status="400") == 1
        assert one(samples, "callboard_http_requests_total", method="GET", route="-", status="404") == 20
        assert one(samples, "callboard_http_requests_total", method="other", route="-", status="404") == 20
        assert one(samples, "callboard_http_request_duration_seconds_count", route=route) == 2
        assert one(samples, "callboard_http_requests_in_flight") == 1  # this one
        assert live.wait_until(lambda: live.runner.server.traffic.num_connections == 0, 2)


def test_what_the_server_refuses_and_cuts_is_counted() -> None:
    limits = LimitsSection(max_requests=1)
    server = ServerSection(client_timeout_s=0.2, max_connections=2, max_connections_per_address=2)
    with LiveServer(FakeIngress(delay_s=0.01), limits=limits, server=server) as live:
        with RawClient(live.port), RawClient(live.port), RawClient(live.port) as slow:  # the first makes room
            slow.send(b"GET /he")
            assert slow.read_reply().status == 408
        assert live.wait_until(lambda: not live.runner.server.connections, 2)
        stream = live.call(lambda: live.ingress.open("!hang", SamplingParams()))
        assert ask(live.port, "POST", "/v1/completions", COMPLETION).status == 429
        samples = scrape(live)
        assert one(samples, "callboard_admission_rejections_total", reason="queue_full") == 1
        assert one(samples, "callboard_http_connections_cut_total", reason="evicted") == 1
        assert one(samples, "callboard_http_connections_cut_total", reason="header_timeout") >= 1
        live.call(stream.close)


def test_scrapers_that_ask_for_openmetrics_get_it(live: LiveServer) -> None:
    reply = ask(live.port, "GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.body.endswith(b"# EOF\n")


def test_the_numbers_need_the_key() -> None:
    with LiveServer(server=ServerSection(api_key="a client", operator_key="s3cret")) as live:
        for path in ("/metrics", "/stats"):
            assert ask(live.port, "GET", path).status == 401
            assert ask(live.port, "GET", path, headers={"Authorization": "Bearer s3cret"}).status == 200
