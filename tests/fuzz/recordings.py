"""Foreign bytes as a recording, and its state as objects.

Owns: how bytes become a file.  What does not begin as one does is frames, each a kind, a length of two bytes and what
is packed with the right checksum.
"""

import zlib
from pathlib import Path

from engine.features.recording.file import FORMAT, NAME, RecordingError, read_recording
from engine.features.recording.state import StateError, state_of
from engine.host.appended_file import frame


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    path = folder / "some.cbr"
    path.write_bytes(data if data.startswith(NAME) else _framed(data))
    try:
        recording = read_recording(path)
        if recording.state:
            state_of(recording.state, ())
    except (RecordingError, StateError):
        pass


def _framed(data: bytes) -> bytes:
    frames, at = [NAME + b"%d\n" % FORMAT], 0
    while at < len(data):
        end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        frames.append(frame(data[at : at + 1] + zlib.compress(data[at + 3 : end], 1)))
        at = end
    return b"".join(frames)
