"""Films: the files of their frames as one piece of bytes, and the frames in it, read with Pillow.

Owns: how films are packed, which files move.  Does not know: models, limits, which frames a model is shown.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from io import BytesIO
from typing import TYPE_CHECKING, Final

import msgspec

from engine.text.mp4_files import is_mp4, mp4_frames, mp4_length
from engine.text.picture_files import read_picture
from engine.types.errors import RequestError
from engine.types.prompt import Film

if TYPE_CHECKING:
    from PIL.Image import Image

MOVING: Final = ("GIF", "WEBP", "PNG")
FEWEST_FRAMES: Final = 2


class FilmFile(msgspec.Struct, frozen=True, array_like=True):
    """A film.  files: one that has all frames, or one for each frame."""

    film: Film
    files: tuple[bytes, ...]

    def packed(self) -> bytes:
        """Return the bytes of the film, the same for the same frames."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, data: bytes) -> "FilmFile":
        """Return a film from its bytes.  Raises RequestError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise _unreadable(error) from None

    def frames(self, indices: Sequence[int]) -> "Iterator[Image]":
        """Yield these frames in RGB, by ascending numbers.  Raises RequestError."""
        if len(self.files) > 1:
            yield from (read_picture(self.files[index]) for index in indices)
            return
        try:
            if is_mp4(self.files[0]):
                with closing(mp4_frames(self.files[0], indices)) as frames:
                    yield from frames
                return
            moving = _opened(self.files[0])
            for index in indices:
                moving.seek(index)
                yield moving.convert("RGB")
        except Exception as error:  # Pillow and PyAV raise errors of every kind for broken files
            raise _unreadable(error) from None


def film_of(files: Sequence[bytes], sizes: Sequence[tuple[int, int]], fps: float) -> tuple[FilmFile, tuple[int, int]]:
    """Return the film of one file for each frame, and their width and height.  Raises RequestError.

    sizes: width and height of each.  fps: 0 if it is not known."""
    if len(files) < FEWEST_FRAMES or len(set(sizes)) > 1:
        found = " and ".join(f"{width} x {height}" for width, height in sorted(set(sizes)))
        raise RequestError(
            f"messages: a video of {len(files)} frames of {found or 0} pixels; it must have at least {FEWEST_FRAMES} "
            "frames, all of one size",
            param="messages",
        )
    return FilmFile(Film(len(files), fps, are_chosen=True), tuple(files)), sizes[0]


def moving_film(data: bytes) -> tuple[FilmFile, tuple[int, int]]:
    """Return the film of a file that has all frames, and their width and height.  Raises RequestError."""
    if is_mp4(data):
        num_frames, fps, size = mp4_length(data)
        return FilmFile(Film(num_frames, fps), (data,)), size
    try:
        moving, milliseconds = _opened(data), 0.0
        num_frames = int(getattr(moving, "n_frames", 1))
        for index in range(num_frames):
            moving.seek(index)
            moving.load()  # a WebP says only then how long a frame is shown
            milliseconds += moving.info.get("duration", 0)
    except Exception as error:
        raise _unreadable(error) from None
    if num_frames < FEWEST_FRAMES:
        raise RequestError("messages: a video of one frame; send it as a picture", param="messages")
    fps = 1000 * num_frames / milliseconds if milliseconds else 0.0
    return FilmFile(Film(num_frames, fps), (data,)), moving.size


def _opened(data: bytes) -> "Image":
    from PIL import Image  # an optional package, which only pictures need

    return Image.open(BytesIO(data), formats=MOVING)


def _unreadable(error: Exception) -> RequestError:
    formats = ", ".join(MOVING)
    return RequestError(
        f"a video cannot be read ({error}); it must be an MP4, a moving {formats}, or a list of frames",
        param="messages",
    )
