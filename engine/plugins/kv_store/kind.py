"""The kind of the stores of KV pages."""

from typing import Final

from engine.plugins.kind import new_kind

KV_STORE: Final = "kv_store"
KIND: Final = new_kind(KV_STORE, "kv_store", "files", moves_pages=True)
