"""Anthropic's API as a part of the server."""

from server.extensions.anthropic.endpoint import CountRoute, Messages
from server.extensions.anthropic.objects import message_errors
from server.run.extension import Extension, ServerParts


class AnthropicExtension(Extension):
    """POST /v1/messages and /v1/messages/count_tokens."""

    endpoints = (Messages,)
    handlers = (CountRoute,)
    # Clients of this API report events to the second path, which nothing here reads.
    error_formats = dict.fromkeys(("/v1/messages", "/api/event_logging"), message_errors)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(CountRoute(parts.backend.codec, parts.translator, parts.server))


EXTENSION = AnthropicExtension()
