"""The part of the section [storage] about clients' files, and how long they are kept."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class FileSettings(Addition, frozen=True):
    """The part of [storage] about clients' files, and how long they are kept."""

    table: ClassVar[str] = "storage"

    quota_mb: Annotated[int, key(
        "Most storage of one API key for files, responses and batches; beyond it requests get 400", ge=1
    )] = 1024
    retention_hours: Annotated[int, key(
        "Finished files, responses and batches are deleted after this time; 0 for never", ge=0
    )] = 720
