"""The part of the section [storage] about the journal of streams."""

from typing import Annotated, ClassVar, Literal

from engine.settings.section import Addition, key


class JournalSettings(Addition, frozen=True):
    """The part of [storage] about the journal of streams."""

    table: ClassVar[str] = "storage"

    journal_streams: Annotated[bool, key(
        "Write streams to the journal, so that clients can rejoin them, even after a crash of the server"
    )] = False
    fsync: Annotated[Literal["always", "interval", "never"], key(
        "What the journal may lose in a power loss: nothing, a second, or all that the system has not written; a "
        "crash of the server loses nothing"
    )] = "interval"
    journal_mb: Annotated[int, key("Largest journal, on disk and in memory, in MiB", ge=8)] = 256
    rejoin_s: Annotated[float, key(
        "How long a stream continues without its client, and stays available after its end", gt=0
    )] = 60.0
