"""The process of an encoder: ``python -m engine.features.images.encoder_main``, which only a rank starts.

Owns: its life, from the ticket to its end, and what it reads and writes.  Does not know: requests, the rank's rows.
It reads a length of four bytes and so many of a list of ``ToEncode``, and writes ``Encoded`` for each in the same way,
with the bytes of the rows behind it, until its input ends.
"""

import logging
import os
import struct
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from engine.config import Config
from engine.features.images.messages import NOT_ENCODED
from engine.host.logs import LogSettings
from engine.plugins.encoder.encoder import ToEncode, encode_each
from engine.types.errors import RequestError, WeightsError
from engine.workers.child import begin, die_with, end

log = logging.getLogger(__name__)

LENGTH: Final = struct.Struct("<I")


class EncoderTicket(msgspec.Struct, frozen=True, array_like=True):
    """The model of an encoder's process, and where it runs.

    directory: the checkpoint's.  device, dtype: as in ``Encoder.tower``.  num_threads: of torch on a CPU.
    parent: the process to die with."""

    config: Config
    directory: str
    device: str
    dtype: str
    num_threads: int
    logs: LogSettings
    parent: int


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a picture; the first answer of all says that the weights are loaded, and has no rows.

    shape, num_bytes: of the rows, whose bytes follow.  reason: why there are none; '' if there are.
    status: of the error."""

    shape: tuple[int, ...] = ()
    num_bytes: int = 0
    reason: str = ""
    status: int = 0


def send(stream: IO[bytes], data: bytes) -> None:
    """Write bytes with their length before them."""
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Return bytes that ``send`` has written.  Raises EOFError."""
    return read_exactly(stream, *LENGTH.unpack(read_exactly(stream, LENGTH.size)))


def read_exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    """Return so many bytes.  Raises EOFError if there are fewer."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def serve(ticket: EncoderTicket, stream: IO[bytes], answers: IO[bytes]) -> None:
    """Load the encoder and answer each picture, until the stream ends."""
    import torch

    from engine.plugins.encoder.choice import chosen_encoder

    torch.set_num_threads(ticket.num_threads)
    try:
        encoder = chosen_encoder(ticket.config, Path(ticket.directory))
        if encoder is None:
            raise WeightsError(f"{ticket.directory}: this model takes no pictures here")
        tower = encoder.tower(ticket.device, ticket.dtype)
    except Exception as error:
        reason = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
        send(answers, msgspec.msgpack.encode(Encoded(reason=reason)))
        return
    send(answers, msgspec.msgpack.encode(Encoded()))
    while True:
        pictures = msgspec.msgpack.decode(receive(stream), type=list[ToEncode])
        for found in encode_each(tower, pictures):
            answer, rows = Encoded(reason=NOT_ENCODED, status=500), memoryview(b"")
            if isinstance(found, torch.Tensor) and found.dtype == getattr(torch, ticket.dtype):
                rows = found.cpu().contiguous().view(torch.uint8).numpy().data
                answer = Encoded(tuple(found.shape), found.nbytes)
            elif isinstance(found, RequestError):
                answer = Encoded(reason=found.message, status=found.status)
            elif isinstance(found, Exception):  # of a library, by a picture
                log.error("a picture cannot be encoded", exc_info=found)
            else:
                log.error("an encoder's rows are %s, and those of the model %s", found.dtype, ticket.dtype)
            send(answers, msgspec.msgpack.encode(answer))
            answers.write(rows)
            answers.flush()


def main() -> None:
    """Serve until the rank has closed the pipe, or has died."""
    ticket = begin(EncoderTicket)
    die_with(ticket.parent)
    ticket.logs.apply("encoder")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints would write between the answers
    try:
        serve(ticket, os.fdopen(sys.stdin.fileno(), "rb", closefd=False), answers)
    except (EOFError, BrokenPipeError):
        end(0)
    end(1)


if __name__ == "__main__":
    main()
