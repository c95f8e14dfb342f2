"""The part of the section [kv] about pages in host memory."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class HostTierSettings(Addition, frozen=True):
    """The part of [kv] about pages in host memory."""

    table: ClassVar[str] = "kv"

    num_host_pages: Annotated[int, key(
        "Pages of host memory for evicted pages, which return from there; 0 for none", ge=0
    )] = 0
