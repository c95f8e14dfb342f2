"""The options that every carrier of KV pages has.

Owns: their defaults.  Does not know: how a carrier works.
"""

from typing import Annotated, Final

from msgspec import Meta

from engine.plugins.options import Options
from engine.types.errors import PluginError

FRAME_BYTES: Final = 4096  # of a message beside its pages


class CarrierOptions(Options, frozen=True, kw_only=True):
    """Options of every carrier.

    name: of this engine among the others.
    timeout_s: longest wait of a prompt for its pages; it is computed from where they end then.
    lease_s: how long pages stay for an engine that was offered them or fetches them, after its last message.
    lent_share: most of the pool's pages that are kept for other engines.
    group_kb: kilobytes of pages in one message, or one page if that is more.
    buffer_mb: megabytes of pages from others that wait for a step."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,48}$")] = "engine"
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    lease_s: Annotated[float, Meta(gt=0)] = 10.0
    lent_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    group_kb: Annotated[int, Meta(ge=1)] = 1024
    buffer_mb: Annotated[int, Meta(ge=1)] = 256


def check_ring(plugin: str, ring_mb: int, group_bytes: int) -> None:
    """Raise PluginError for a ring that no group of pages fits: every one of its messages would be lost."""
    if ring_mb << 20 < group_bytes + FRAME_BYTES:
        least = -(-(group_bytes + FRAME_BYTES) >> 20)
        raise PluginError(
            f"{plugin}: ring_mb={ring_mb} has no room for a group of pages of {group_bytes} bytes; set ring_mb to at "
            f"least {least}, or group_kb and kv.page_size lower"
        )
