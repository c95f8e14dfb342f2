"""The part of the section [plugins] about stores of KV pages."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class StoreChoice(Addition, frozen=True):
    """The part of [plugins] about stores of KV pages."""

    table: ClassVar[str] = "plugins"

    kv_store: Annotated[str, key(
        "Store for KV pages outside the pool and the process: files; 'none' is no store", changed="executors"
    )] = "none"
