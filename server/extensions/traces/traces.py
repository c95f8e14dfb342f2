"""OpenTelemetry traces: a span for each request, and below it where its time went in the engine.

Owns: the spans, their names and attributes.  Does not know: what collects them; requests when tracing is off.
opentelemetry is imported here alone, and only if the configuration asks for traces: pip install 'callboard[otel]'.
What prompts and outputs say is in no span.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aiohttp import web

from engine.plugins.hookspecs import hookimpl
from engine.scheduling.meter import RequestMetrics
from engine.types.errors import ConfigError
from server.backend import EngineStream
from server.clients import CLIENT
from server.http.exchange import EXCHANGE, Exchange
from server.http.operation import Handler

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
API_ROUTES = "/v1/"  # probes and scrapes are not worth a span
MAX_OPEN = 65536  # requests whose end may not have come; some never will, refused by the tokenizer
NS = 1_000_000_000
SEND_TIMEOUT_S = 2  # also what a collector that does not answer may cost at shutdown


def is_installed() -> bool:
    """Return whether OpenTelemetry's exporter can be imported."""
    try:
        return find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False


def open_provider(endpoint: str, version: str) -> "TracerProvider":
    """Returns what sends spans in batches to ``endpoint``, by HTTP from a thread of their own.

    Raises ConfigError without the package."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("server.traces needs OpenTelemetry: pip install 'callboard[otel]'") from None
    resource = Resource.create({"service.name": "callboard", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)))
    return provider


class Traces:
    """``middleware`` makes the spans of requests; as an observer of the engine it adds those below them.

    A request that brings a ``traceparent`` header becomes part of that trace."""

    def __init__(self, provider: "TracerProvider", model: str) -> None:
        from opentelemetry import propagate, trace

        self._trace = trace
        self._extract = propagate.extract
        self._provider = provider
        self._tracer = provider.get_tracer("callboard")
        self._model = model
        self._contexts: OrderedDict[int, Any] = OrderedDict()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Put a span around the handling of an API request."""
        exchange = request[EXCHANGE]
        work = "" if exchange.operation is None else exchange.operation.span
        if not work and not exchange.route.startswith(API_ROUTES):
            return await handler(request)
        with self._tracer.start_as_current_span(
            f"{request.method} {exchange.route}",
            context=self._extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "http.request.method": request.method,
                "http.route": exchange.route,
                "url.path": request.path,
                "url.scheme": request.scheme,
                "callboard.request_id": exchange.id,
                **self._of_model(work),
            },
            record_exception=False,  # its text may hold parts of the request
        ) as span:
            if span.is_recording():
                request[CLIENT].opened = partial(self._note, self._trace.set_span_in_context(span))
            try:
                response = await handler(request)
            except Exception as error:
                status = getattr(error, "status", 500)
                span.set_attributes(
                    {"http.response.status_code": status, "error.type": getattr(error, "code", str(status))}
                )
                raise
            finally:
                span.set_attributes(_of_answer(exchange))
            span.set_attribute("http.response.status_code", response.status)
            return response

    def _of_model(self, work: str) -> dict[str, str]:
        """Returns what a span says of the model.  work: what conventions call it; '' for a route without a name."""
        if not work:
            return {}
        return {
            "gen_ai.operation.name": work,
            "gen_ai.provider.name": "callboard",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }

    def _note(self, context: Any, stream: EngineStream) -> None:
        """Remember the span of a request that the engine will speak of by its own number."""
        self._contexts[stream.request_id] = context
        if len(self._contexts) > MAX_OPEN:
            self._contexts.popitem(last=False)

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        """Make the phases' spans after the fact, at the times by the engine's clock."""
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for one in requests:
            context = self._contexts.pop(one.request_id, None)
            if context is None:
                continue
            queue_s = one.e2e_s if one.queue_s is None else one.queue_s
            first_s = one.e2e_s if one.ttft_s is None else one.ttft_s
            marks = [epoch_ns + int((one.arrived_at + after) * NS) for after in (0, queue_s, first_s, one.e2e_s)]
            prefill: dict[str, int | str] = {"prompt_tokens": one.num_prompt_tokens, "cached_tokens": one.cached_tokens}
            decode: dict[str, int | str] = {
                "output_tokens": one.num_output_tokens,
                "retractions": one.num_retractions,
                "finish": one.finish.name.lower(),
            }
            phases = {"queue": {}, "prefill": prefill, "decode": decode}
            for (name, about), start, end in zip(phases.items(), marks, marks[1:], strict=False):
                attributes = {f"callboard.{key}": value for key, value in about.items()}
                self._tracer.start_span(name, context, start_time=start, attributes=attributes).end(end)

    async def close(self, app: web.Application) -> None:
        """Send what is left, from a thread: the collector may not answer."""
        await asyncio.to_thread(self._provider.shutdown)


def _of_answer(exchange: Exchange) -> dict[str, str | int]:
    """Returns what a span says of the answer and its session, by the names of the conventions."""
    told: dict[str, str | int] = {}
    if exchange.session:
        told["gen_ai.conversation.id"] = exchange.session
    if len(exchange.names) == 1:
        (told["gen_ai.response.id"],) = exchange.names
    if exchange.usage is not None:
        told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"] = exchange.usage
        told["gen_ai.usage.cache_read.input_tokens"] = exchange.cached_tokens
        told["gen_ai.usage.cache_creation.input_tokens"] = exchange.created_tokens
    return told
