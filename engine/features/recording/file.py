"""A recording as a file: a header, optionally the scheduler's state at its beginning, turns, and an end.

Owns: the format.  Does not know: how turns come about, what they mean.
The file is a line that names the format, and frames as in ``engine/host/appended_file.py``.  A payload is a kind, one
byte, and zlib of msgpack.  A file that was cut is read up to its last whole frame; no content of a file is
executed.
"""

import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.features.recording.turns import Turn
from engine.host.appended_file import Frames, frame, whole_file
from engine.plugins.blueprint import Blueprint
from engine.types.errors import CallboardError

FORMAT = 4
NAME = b"callboard recording "
SUFFIX = ".cbr"
NAMED = re.compile(rf"[0-9]{{8}}T[0-9]{{9}}-([a-z-]+)-[0-9]+{re.escape(SUFFIX)}")  # by ``file_name``; the group: reason
HEADER, STATE, TURNS, END = b"H", b"S", b"T", b"E"
FRAME_ENTRIES = 512  # of the state; turns are cut by size
FRAME_BYTES = 1 << 18
MOST_FRAME_BYTES = 1 << 30  # of one frame, unpacked
LEVEL = 1

T = TypeVar("T")


def file_name(why: str) -> str:
    """Return the name of a recording that is written now."""
    now = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{stamp}{int(now % 1 * 1000):03}-{why}-{os.getpid()}{SUFFIX}"


class RecordingError(CallboardError):
    """An error of a file that is no recording, or none that this version reads."""

    exit_code = 2


class Header(msgspec.Struct, frozen=True):
    """The header of a recording.

    version: version of callboard.  code: as ``planning_code`` returns it.
    python, numpy: versions that it ran with.
    why: the reason for the file.  prompts: 'whole' or 'hashed'.
    written_at_unix_s: by the wall clock.  written_at: by the clock of the readings, in seconds."""

    version: str
    code: str
    python: str
    numpy: str
    why: str
    prompts: str
    written_at_unix_s: float
    written_at: float
    blueprint: Blueprint


class End(msgspec.Struct, frozen=True):
    """The last entry of a whole file.  num_turns: number of turns in the file."""

    num_turns: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that was read.

    state: entries of ``state_entries``; none if it begins with the engine.
    torn: the fault of the file's end, '' if it has none."""

    header: Header
    state: list[Any]
    turns: list[Turn]
    torn: str = ""


def write_recording(path: Path, header: Header, state: Iterable[Any], turns: Iterable[bytes]) -> None:
    """Write a file, which gets its name when it is complete.  turns: each encoded.  Raises OSError, StateError."""
    head = NAME + b"%d\n" % FORMAT
    with whole_file(path, path.with_name(f"{path.name}.part"), head, is_synced=False) as file:
        file.append(_frame(HEADER, msgspec.msgpack.encode(header)))
        entries: list[Any] = []
        for entry in state:
            entries.append(entry)
            if len(entries) == FRAME_ENTRIES:
                file.append(_frame(STATE, msgspec.msgpack.encode(entries)))
                entries = []
        if entries:
            file.append(_frame(STATE, msgspec.msgpack.encode(entries)))
        num_turns = 0
        for part in _parts(turns):
            num_turns += len(part)
            # An array of encoded turns, assembled without decoding them.
            file.append(_frame(TURNS, b"\xdd" + len(part).to_bytes(4, "big") + b"".join(part)))
        file.append(_frame(END, msgspec.msgpack.encode(End(num_turns))))


def _parts(turns: Iterable[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size = 0
    for turn in turns:
        part.append(turn)
        size += len(turn)
        if size >= FRAME_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _frame(kind: bytes, plain: bytes) -> bytes:
    return frame(kind + zlib.compress(plain, LEVEL))


def read_recording(path: Path) -> Recording:
    """Read a file.  Raises RecordingError, and OSError if there is nothing to read."""
    with path.open("rb") as file:
        first = file.readline(len(NAME) + 16)
        if not first.startswith(NAME):
            raise RecordingError(f"{path}: not a recording of callboard; its first line is {first[:40]!r}")
        if first != NAME + b"%d\n" % FORMAT:
            number = first[len(NAME) :].strip().decode("ascii", "replace")
            raise RecordingError(
                f"{path}: format {number}, and this callboard reads format {FORMAT}; take the version that wrote it"
            )
        frames = Frames(file)
        header: Header | None = None
        state: list[Any] = []
        turns: list[Turn] = []
        end: End | None = None
        for payload in frames:
            kind = payload[:1]
            try:
                plain = _unpacked(payload[1:])
            except zlib.error:
                frames.broken = "damaged"
                break
            if kind == HEADER:
                header = _decoded(path, plain, Header)
            elif kind == STATE:
                state += _decoded(path, plain, list[Any])
            elif kind == TURNS:
                turns += _decoded(path, plain, list[Turn])
            elif kind == END:
                end = _decoded(path, plain, End)
    torn = f"the frame at byte {frames.end} is cut or damaged" if frames.broken else ""
    if header is None:
        raise RecordingError(f"{path}: {torn or 'there is no header'}; nothing of it can be replayed")
    if end is not None and end.num_turns != len(turns):
        raise RecordingError(f"{path}: {len(turns)} turns, and its end counts {end.num_turns}")
    if end is None and state and not turns:
        raise RecordingError(f"{path}: {torn or 'it ends early'}, within the state that it begins with")
    return Recording(header, state, turns, "" if end is not None else torn or "its end is missing")


def _unpacked(packed: bytes) -> bytes:
    """Return an unpacked frame.  Raises zlib.error, also if it is larger than a frame may be."""
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(packed, MOST_FRAME_BYTES)
    if not unpacker.eof:
        raise zlib.error("it is too large, or ends early")
    return plain


def _decoded(path: Path, plain: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(plain, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordingError(f"{path}: {error}; take the version of callboard that wrote it") from None
