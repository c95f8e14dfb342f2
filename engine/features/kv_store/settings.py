"""The part of the section [kv] about transfers from and to a store."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class StoreSettings(Addition, frozen=True):
    """The part of [kv] about transfers from and to a store."""

    table: ClassVar[str] = "kv"

    store_timeout_s: Annotated[float, key(
        "Longest wait of a prompt for its pages from plugins.kv_store; then it is computed", gt=0
    )] = 0.5
