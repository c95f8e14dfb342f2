"""OpenTelemetry's traces as a part of the server."""

from collections.abc import Iterator

from engine.config import Config
from server.extensions.traces.settings import SpanSettings
from server.extensions.traces.traces import EXPORTER, Traces, is_installed, open_provider
from server.run.extension import Extension, ServerParts
from server.run.finding import Finding


class TracesExtension(Extension):
    """Spans of requests, where server.traces names a collector."""

    def findings(self, config: Config) -> Iterator[Finding]:
        if SpanSettings.of(config).traces and not is_installed():
            yield Finding("traces", "bad", f"{EXPORTER} is not installed", "pip install 'callboard[otel]'")

    def join(self, parts: ServerParts) -> None:
        if not (url := SpanSettings.read(parts.server).traces):
            return
        traces = Traces(open_provider(url, parts.version), parts.backend.card.name)
        parts.app.middlewares.append(traces.middleware)
        parts.backend.monitor.watch(traces, "server.traces")
        parts.app.on_cleanup.append(traces.close)


EXTENSION = TracesExtension()
