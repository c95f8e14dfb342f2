"""The journal of streams as a part of the server."""

from collections.abc import Iterator

from engine.config import Config
from engine.types.errors import ConfigError
from server.extensions.journal.settings import JournalSettings
from server.extensions.journal.streams import Streams, open_streams
from server.run.extension import Extension, ServerParts
from server.run.finding import Finding


class JournalExtension(Extension):
    """Streams that can be rejoined, where storage.journal_streams is set."""

    handlers = (Streams,)

    def check(self, config: Config, engines: str = "") -> None:
        if engines and JournalSettings.of(config).journal_streams:
            raise ConfigError(
                f"storage.journal_streams: {engines} have no journal; it is for a server of one model alone"
            )

    def findings(self, config: Config) -> Iterator[Finding]:
        if JournalSettings.of(config).journal_streams and not config.storage.folder:
            yield Finding("storage", "bad", "storage.journal_streams has no folder", "set storage.folder")

    def join(self, parts: ServerParts) -> None:
        keys, translator = parts.keys if parts.server.needs_key else None, parts.translator
        streams = open_streams(parts.storage, parts.clients, keys, lambda: translator.card.fingerprint)
        if streams is None:
            return
        # An event without an id cannot be named by the client that comes back.
        kept = {path: one for path, one in parts.served.items() if one.endpoint.operation.framing != "lines"}
        streams.routes |= kept
        for route in kept.values():
            route.keeper = streams
        parts.routes.add(streams)
        parts.gauges.append(streams.gauges)
        parts.app.cleanup_ctx.append(streams.live)


EXTENSION = JournalExtension()
