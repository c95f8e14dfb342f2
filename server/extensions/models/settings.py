"""The part of the section [server] about several models."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ModelsSettings(Addition, frozen=True):
    """The part of [server] about several models."""

    table: ClassVar[str] = "server"

    models_memory_mb: Annotated[int, key(
        "Most memory that loaded [[models]] may use together; the least recently used idle one is unloaded for "
        "another; 0 for no limit", ge=0
    )] = 0
