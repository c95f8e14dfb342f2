"""A process in the place of an encoder's.  Each one that is started takes the next word of a file, and does that.

dies: before its first answer.  waits: never answers.  refuses: says that there are no weights.
babbles: answers a picture with no message.  serves: gives the bytes of a picture back as its rows, and ends with the
picture of the bytes "ends".
It imports nothing of the engine, and so it starts at once."""

import struct
import sys
from pathlib import Path
from typing import Any

import msgspec


def receive() -> list[Any]:
    (length,) = struct.unpack("<I", sys.stdin.buffer.read(4) or sys.exit())
    return msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=list[Any])


def send(data: bytes, rows: bytes = b"") -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data + rows)
    sys.stdout.buffer.flush()


def main() -> None:
    script = Path(receive()[1])
    word, *others = script.read_text().split()
    script.write_text(" ".join(others))
    if word == "dies":
        sys.exit(7)
    if word == "waits":
        sys.stdin.buffer.read()
    send(msgspec.msgpack.encode([[], 0, "no weights" if word == "refuses" else ""]))
    while word != "refuses":
        for rows, *_ in receive():
            if rows == b"ends":
                sys.exit(9)
            answer = msgspec.msgpack.encode([[1, len(rows) // 4, 1], len(rows)])
            send(b"\xc1" if word == "babbles" else answer, rows)


if __name__ == "__main__":
    main()
