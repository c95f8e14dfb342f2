"""The kind of what carries KV pages between engines."""

from typing import Final

from engine.plugins.kind import new_kind

TRANSFER: Final = "transfer"
KIND: Final = new_kind(TRANSFER, "transfer", "shared_memory tcp nixl mooncake", moves_pages=True)
