"""MP4 files, read with PyAV: their frames, one after the other, on one thread.

Owns: which codecs are read, how frames are turned, the name of the package to install.
Does not know: limits, models, which frames are shown.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engine.types.errors import RequestError
from engine.types.prompt import LEAST_FPS

if TYPE_CHECKING:
    from PIL.Image import Image

NAME: Final = "MP4"
CODECS: Final = ("h264", "hevc", "vp9", "av1", "mpeg4")
STILL: Final = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")  # pictures in the same kind of boxes
MISSING: Final = (
    "an MP4, which PyAV reads, and it is not installed here: the operator installs it with "
    "pip install 'callboard[video]'; a moving GIF, WebP or PNG and a list of frames need no package"
)


def is_mp4(data: bytes) -> bool:
    """Return whether a file begins as an MP4 does."""
    return data[4:8] == b"ftyp" and data[8:12] not in STILL


class Mp4Error(Exception):
    """A file cannot be read.  The message follows the name of the field."""


class Mp4:
    """An open file.

    width, height, num_frames, fps, seconds: as its header says; 0 where it does not.
    quarter_turns: counterclockwise ones that show its frames upright, known from the first frame on."""

    def __init__(self, container: Any) -> None:
        """Find the pictures of an open container.  Raises Mp4Error."""
        if not container.streams.video:
            raise Mp4Error("an MP4 without pictures")
        self._container = container
        self._stream = stream = container.streams.video[0]
        stream.thread_type = "NONE"  # the process's own thread alone: its time and memory are bounded
        context = stream.codec_context
        if (codec := context.codec.canonical_name) not in CODECS:
            raise Mp4Error(f"an MP4 in {codec[:20]}; {', '.join(CODECS)} are read")
        self.width, self.height = int(context.width), int(context.height)
        self.num_frames = int(stream.frames)
        self.fps = float(stream.average_rate or 0)
        if 0 < self.fps < LEAST_FPS:
            raise Mp4Error(f"an MP4 of {self.fps:.1g} frames a second; at least {LEAST_FPS} are needed")
        self.seconds = float(stream.duration * stream.time_base) if stream.duration else 0.0
        self.quarter_turns = 0

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height of a frame as it is shown, after the first one."""
        return (self.height, self.width) if self.quarter_turns % 2 else (self.width, self.height)

    def frames(self) -> Iterator[Any]:
        """Yield all frames as PyAV has them.  Raises Mp4Error for one of another size; and as PyAV does."""
        for number, frame in enumerate(self._container.decode(self._stream)):
            if (frame.width, frame.height) != (self.width, self.height):
                raise Mp4Error(f"a damaged MP4: frame {number} has another size")
            if number == 0:  # a telephone that was held upright writes pictures that lie, and how to turn them
                self.quarter_turns = round(frame.rotation / 90)
            yield frame


@contextmanager
def open_mp4(data: bytes) -> Iterator[Mp4]:
    """Open a file, which opens no other one.  Raises ImportError without PyAV, Mp4Error, and errors of PyAV."""
    import av  # an optional package, which only videos need

    av.logging.set_level(av.logging.PANIC)
    with av.open(BytesIO(data), format="mp4", options={"protocol_whitelist": ""}) as container:
        yield Mp4(container)


def mp4_frames(data: bytes, indices: Sequence[int]) -> "Generator[Image, None, None]":
    """Yield frames in RGB, upright, by their numbers, which ascend and may come again.  Raises as ``open_mp4``."""
    from PIL import Image

    left = [*reversed(indices)]
    with open_mp4(data) as file:
        for number, frame in enumerate(file.frames()):
            if left and left[-1] == number:  # the conversion of a frame takes longer than its decoding
                picture = Image.fromarray(np.rot90(frame.to_ndarray(format="rgb24"), file.quarter_turns))
            while left and left[-1] == number:
                left.pop()
                yield picture
            if not left:
                return
    raise Mp4Error(f"an MP4 has no frame {left[-1]}")


def mp4_length(data: bytes) -> tuple[int, float, tuple[int, int]]:
    """Return the number of frames, frames a second, width and height as shown.  All frames are decoded.

    Raises RequestError."""
    try:
        with open_mp4(data) as file:
            return sum(1 for _ in file.frames()), file.fps, file.shown_size
    except ImportError:
        raise RequestError(f"messages: {MISSING}", param="messages") from None
    except Exception as error:  # PyAV raises errors of every kind for broken files
        raise RequestError(f"messages: a video cannot be read ({error})", param="messages") from None
