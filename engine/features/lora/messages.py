"""The messages about adapters that are read next to the steps: which to read or to drop, and a rank's answer.

Owns: how they are encoded.  Does not know: when they are sent.
"""

import msgspec

from engine.features.lora.files import NAME, Adapter
from engine.messages import FeatureAnswer, FeatureRequest


class ReadAdapter(msgspec.Struct, frozen=True, array_like=True):
    """Read an adapter's files into memory of the host, for the step that places it.

    drop: no step will place it; forget what was read, without an answer."""

    adapter: Adapter
    drop: bool = False

    def message(self, number: int) -> FeatureRequest:
        """Return it as a message for every rank, whose answers have this number."""
        return FeatureRequest(feature=NAME, number=number, body=msgspec.msgpack.encode(self))

    @classmethod
    def of(cls, message: FeatureRequest) -> "ReadAdapter":
        """Return the content of a message."""
        return msgspec.msgpack.decode(message.body, type=cls)


class AdapterRead(msgspec.Struct, frozen=True, array_like=True):
    """A rank has read an adapter, or could not.  reason: for the client; '' if it has."""

    reason: str = ""

    def message(self, rank: int, number: int) -> FeatureAnswer:
        """Return it as a message for the planner."""
        return FeatureAnswer(rank=rank, feature=NAME, number=number, body=msgspec.msgpack.encode(self))

    @classmethod
    def of(cls, message: FeatureAnswer) -> "AdapterRead":
        """Return the content of a message."""
        return msgspec.msgpack.decode(message.body, type=cls)


def sentence(message: FeatureRequest | FeatureAnswer) -> str:
    """Return a message in words."""
    if isinstance(message, FeatureRequest):
        wanted = ReadAdapter.of(message)
        return f"{'drop' if wanted.drop else 'read'} adapter {wanted.adapter.digest[:12]}"
    return f"adapter {message.number} on rank {message.rank}: {AdapterRead.of(message).reason or 'read'}"
