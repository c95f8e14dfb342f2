"""The part of the section [plugins] about what carries KV pages between engines."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class TransferChoice(Addition, frozen=True):
    """The part of [plugins] about what carries KV pages between engines."""

    table: ClassVar[str] = "plugins"

    transfer: Annotated[str, key(
        "Carrier of KV pages between engines: shared_memory, tcp, nixl, mooncake; 'none' is no other engine",
        changed="executors",
    )] = "none"
