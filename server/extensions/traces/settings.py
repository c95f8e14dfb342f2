"""The part of the section [server] about spans of requests."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class SpanSettings(Addition, frozen=True):
    """The part of [server] about spans of requests."""

    table: ClassVar[str] = "server"

    traces: Annotated[str, key(
        "URL for OpenTelemetry spans, e.g. 'http://127.0.0.1:4318/v1/traces'; empty for none", is_place=True
    )] = ""
