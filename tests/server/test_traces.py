"""Spans: one for each request, linked to the caller's, with the engine's phases below it."""

import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.null_engine import NullSystem
from engine.config import Config, build_config
from engine.messages import Finish
from engine.scheduling.meter import RequestMetrics
from engine.settings.sections import ServerSection
from engine.types.errors import ConfigError
from server.extensions.traces import extension
from server.extensions.traces.traces import open_provider
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer
from tests.server.live_system import MODEL as SERVED
from tests.server.live_system import LiveSystem

COMPLETION = {"model": MODEL, "prompt": "secret words", "max_tokens": 3}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(extension, "open_provider", lambda endpoint, version: provider)
    return exporter


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Iterator[LiveServer]:
    with LiveServer(server=ServerSection(traces="http://127.0.0.1:9/v1/traces")) as live:
        yield live


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_in_the_callers_trace(
    traced: LiveServer, exporter: InMemorySpanExporter, stream: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = {**COMPLETION, "stream": stream, "session_id": "s"}
    reply = ask(traced.port, "POST", "/v1/completions", body, headers)
    assert reply.status == 200
    span = spans(exporter)["POST /v1/completions"]
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.attributes is not None
    assert span.attributes["callboard.request_id"] == "mine"
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["http.response.status_code"] == 200
    named = ("operation.name", "provider.name", "request.model", "response.model")
    found = [span.attributes[f"gen_ai.{name}"] for name in named]
    assert found == ["text_completion", "callboard", MODEL, MODEL]
    assert (span.attributes["url.path"], span.attributes["url.scheme"]) == ("/v1/completions", "http")
    assert "error.type" not in span.attributes
    assert span.attributes["gen_ai.conversation.id"] == "s"
    assert f'"{span.attributes["gen_ai.response.id"]}"' in reply.body.decode()
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert span.attributes["gen_ai.usage.cache_creation.input_tokens"] == 0
    assert "secret" not in span.to_json()


def test_what_generates_nothing_is_no_chat(traced: LiveServer, exporter: InMemorySpanExporter) -> None:
    assert ask(traced.port, "GET", "/v1/models").status == 200
    assert "gen_ai.operation.name" not in (spans(exporter)["GET /v1/models"].attributes or {})


def test_refused_requests_are_spans_and_probes_are_not(traced: LiveServer, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/ready", "/metrics"):
        ask(traced.port, "GET", path)
    assert ask(traced.port, "POST", "/v1/completions", {**COMPLETION, "temperature": -1}).status == 400
    assert list(spans(exporter)) == ["POST /v1/completions"]
    (span,) = spans(exporter).values()
    assert (span.attributes or {})["http.response.status_code"] == 400
    assert (span.attributes or {})["error.type"] == "invalid_value"


def test_the_engines_phases_lie_below_the_request_one_after_another(
    traced: LiveServer, exporter: InMemorySpanExporter
) -> None:
    ask(traced.port, "POST", "/v1/completions", COMPLETION)
    (observer,) = traced.monitor.observers
    (stream,) = traced.ingress.opened
    one = RequestMetrics(stream.request_id, Finish.STOP, 7, 3, 4, 1, 50.0, 0.5, 1.5, 0.1, 4.0)
    unknown = RequestMetrics(999, Finish.STOP, 7, 3, 4, 1, 50.0, 0.5, 1.5, 0.1, 4.0)
    traced.call(lambda: observer.callboard_request_finished([one, unknown, one]))  # type: ignore[attr-defined]
    found = exporter.get_finished_spans()
    assert [span.name for span in found] == ["POST /v1/completions", "queue", "prefill", "decode"]
    root, *phases = found
    for span, seconds in zip(phases, (0.5, 1.0, 2.5), strict=True):
        assert span.parent == root.context
        assert span.start_time is not None
        assert span.end_time is not None
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds)
    assert phases[0].end_time == phases[1].start_time
    assert dict(phases[2].attributes or {}) == {
        "callboard.output_tokens": 3,
        "callboard.retractions": 1,
        "callboard.finish": "stop",
    }


def test_a_whole_engine_times_its_own_phases(exporter: InMemorySpanExporter) -> None:
    tables = {
        "model": {"path": "demo", "name": SERVED},
        "kv": {"num_pages": 64},
        "server": {"traces": "http://127.0.0.1:9/v1/traces"},
    }
    with LiveSystem(build_config(Config(), tables), NullSystem) as live:
        assert live.complete([1, 2, 3], max_tokens=5).status == 200
        assert live.wait_until(lambda gauges: len(exporter.get_finished_spans()) == 4, 2)
    found = spans(exporter)
    root = found["POST /v1/completions"]
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(span.parent == root.context for span in phases)
    assert dict(phases[2].attributes or {})["callboard.output_tokens"] == 5
    # By the engine's clock, but on the same time line; a millisecond for the two readings of the clock.
    assert (root.start_time or 0) - 1_000_000 <= (phases[0].start_time or 0)
    assert (phases[2].end_time or 0) <= (root.end_time or 0) + 1_000_000


def test_a_request_that_never_ran_waited_all_its_life(traced: LiveServer, exporter: InMemorySpanExporter) -> None:
    ask(traced.port, "POST", "/v1/completions", COMPLETION)
    (observer,) = traced.monitor.observers
    one = RequestMetrics(traced.ingress.opened[0].request_id, Finish.ABORT, 7, 0, 0, 0, 50.0, None, None, None, 4.0)
    traced.call(lambda: observer.callboard_request_finished([one]))  # type: ignore[attr-defined]
    queue = spans(exporter)["queue"]
    assert ((queue.end_time or 0) - (queue.start_time or 0)) / 1e9 == pytest.approx(4.0)


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="callboard\\[otel\\]"):
        open_provider("http://127.0.0.1:9/v1/traces", "0")


def test_a_collector_that_is_not_there_disturbs_nobody() -> None:
    with LiveServer(server=ServerSection(traces="http://127.0.0.1:9/v1/traces")) as live:
        assert ask(live.port, "POST", "/v1/completions", COMPLETION).status == 200
