"""The part of the section [plugins] about eviction strategies."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class EvictionSettings(Addition, frozen=True):
    """The part of [plugins] about eviction strategies."""

    table: ClassVar[str] = "plugins"

    eviction: Annotated[str, key(
        "Eviction order of the prefix cache: lru, lfu, fifo, slru, s3fifo, priority, lease; 'auto' is lru",
        changed="executors",
    )] = "auto"
