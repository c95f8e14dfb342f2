"""The records of a request in the journal: that it was accepted, what it has produced, and how it has ended.

Owns: the records and their bytes.  Does not know: files, HTTP, the engine.
``number`` is the request's own in its journal; ``at`` is the record's place among those of its request, so that a
missing one shows.
"""

import uuid

import msgspec

from engine.messages import Delta
from engine.types.errors import RequestError


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A request, as it came.  The first record of each.

    stream_id: what its client calls it.  owner: of the key, "" where there are none.  client: whose share
    it takes.  path: the route's.  body: JSON as sent.  seed: of the choices without one.  key, created: see ``Origin``.
    model: the fingerprint of what has answered.  pictures: the digest of each."""

    number: int
    stream_id: str
    owner: str
    client: str
    path: str
    body: bytes
    seed: int
    key: uuid.UUID
    created: float
    model: str
    pictures: tuple[str, ...] = ()


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """New output of a choice, as its client gets it."""

    number: int
    at: int
    index: int
    delta: Delta


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The failure of a request."""

    message: str
    status: int
    code: str
    param: str | None
    retry_after_s: int | None

    @classmethod
    def of(cls, error: RequestError) -> "Failure":
        """Returns an error as the journal has it."""
        return cls(error.message, error.status, error.code, error.param, error.retry_after_s)

    def error(self) -> RequestError:
        """Returns the error, anew each time: its reader may change it."""
        return RequestError(**msgspec.structs.asdict(self))


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The end of a request.  when: seconds since 1970.  failure: if it has failed.

    is_forgotten: no client can ask for it any more."""

    number: int
    at: int
    when: float
    failure: Failure | None = None
    is_forgotten: bool = False


Record = Accepted | Delivered | Ended
_ENCODER = msgspec.msgpack.Encoder(uuid_format="bytes")
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
encode = _ENCODER.encode


def decode(record: bytes) -> Record:
    """Returns a record.  Raises msgspec.MsgspecError for what is none."""
    try:
        return _DECODER.decode(record)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
