"""The host tier's part of a step: copies between the KV pool and host memory."""

from typing import Final

import msgspec

from engine.messages import Step

NAME: Final = "host_tier"


class Transfers(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Copies, to be made in this order.

    to_host: int32[X], 1 for device page to host page, 0 for back.
    device_pages, host_pages: int32[X]."""

    to_host: bytes = b""
    device_pages: bytes = b""
    host_pages: bytes = b""

    def part(self) -> dict[str, bytes]:
        """Return the parts of a step with these copies."""
        return {NAME: msgspec.msgpack.encode(self)}


NO_TRANSFERS: Final = Transfers()
_decoder = msgspec.msgpack.Decoder(Transfers)


def transfers_of(step: Step) -> Transfers:
    """Return the copies of a step."""
    return _decoder.decode(part) if (part := step.parts.get(NAME)) is not None else NO_TRANSFERS
