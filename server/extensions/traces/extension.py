"""OpenTelemetry's traces as a part of the server."""

from server.extensions.traces.traces import Traces, open_provider
from server.run.extension import Extension, ServerParts


class TracesExtension(Extension):
    """Spans of requests, where server.traces names a collector."""

    def join(self, parts: ServerParts) -> None:
        if not parts.server.traces:
            return
        traces = Traces(open_provider(parts.server.traces, parts.version), parts.backend.card.name)
        parts.app.middlewares.append(traces.middleware)
        parts.backend.monitor.watch(traces, "server.traces")
        parts.app.on_cleanup.append(traces.close)


EXTENSION = TracesExtension()
