"""The process that decodes pictures, to see whether they can be: ``python -m server.extensions.images.decoding``.

Owns: what it reads and writes, its memory.  Does not know: requests, the processes that it has beside it.
It reads a kind of one byte, a length of 8 bytes and a file, and writes a line of JSON, until its input ends.  A picture
is decoded as transformers' ``load_image`` does it, and a film frame by frame, so that the engine can decode what passes
here.
"""

import os
import resource
import sys
import warnings
from io import BytesIO
from typing import Any, BinaryIO, Final

import msgspec

from engine.text.film_files import FEWEST_FRAMES, MOVING
from engine.text.mp4_files import MISSING, Mp4Error, is_mp4, open_mp4
from server.extensions.images.header import (
    MAX_PIXELS,
    PictureError,
    PictureHeader,
    check_exif,
    check_frames,
    check_mp4,
    read_header,
    read_mp4,
)

LENGTH_BYTES: Final = 8
PICTURE, FILM = b"p", b"f"
AS_FILMS: Final = "a video is read as an MP4, as a moving GIF, WebP or PNG, or as a list of frames"
MP4_TYPE: Final = "video/mp4"
MAX_MEMORY: Final = 1 << 30
NICENESS: Final = 5  # the engine goes first
NOT_INSTALLED: Final = "not installed"
MEDIA_TYPES: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# Pillow names a JPEG with further pictures in it so.
SAME: Final = {"MPO": "JPEG"}


class Verdict(msgspec.Struct, frozen=True):
    """The finding on a picture.  problem: empty for a good one.  width, height: as it is shown, turned upright.

    num_frames, fps: of a film; fps is 0 where the file does not say it."""

    problem: str = ""
    width: int = 0
    height: int = 0
    media_type: str = ""
    num_frames: int = 0
    fps: float = 0.0


def judged(data: bytes, kind: bytes = PICTURE) -> Verdict:
    """Return the finding on a picture, of which only the first frame is read, or on a film."""
    if kind == FILM and is_mp4(data):
        return _judged_mp4(data)
    try:
        header = read_header(data)
        if kind == FILM and header.format not in MOVING:
            raise PictureError(f"a {header.format}, which does not move")
    except PictureError as error:
        return Verdict(str(error) if kind == PICTURE else f"{error}; {AS_FILMS}")
    try:
        from PIL import Image
    except ImportError:
        return Verdict(NOT_INSTALLED)
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=list(MEDIA_TYPES))
            found = (SAME.get(image.format or "", image.format), *image.size)
            if found != header:
                return Verdict(f"a damaged {header.format}: its header and its content are of different sizes")
            return _decoded(image, header) if kind == PICTURE else _decoded_film(image, header)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return Verdict(f"a {header.format} whose content has more than {MAX_PIXELS} pixels, unlike its header")
    except PictureError as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict(f"a {header.format} that needs more than {MAX_MEMORY >> 20} MiB to be decoded")
    except Exception as error:  # whatever a decoder raises is the file's fault
        return Verdict(f"a {header.format} that cannot be decoded ({type(error).__name__}); it is damaged or cut off")


def _decoded(image: Any, header: PictureHeader) -> Verdict:
    """Return the finding on an open picture.  Raises PictureError, and whatever Pillow does."""
    from PIL import ImageOps

    image.load()
    check_exif(header.format, len(image.info.get("exif", b"")))
    upright = ImageOps.exif_transpose(image).convert("RGB")
    return Verdict("", *upright.size, MEDIA_TYPES[header.format])


def _decoded_film(image: Any, header: PictureHeader) -> Verdict:
    """Return the finding on an open file that moves.  Raises as ``_decoded``."""
    num_frames, milliseconds = int(getattr(image, "n_frames", 1)), 0.0
    check_frames(header.format, num_frames, header.width * header.height)
    for index in range(num_frames):
        image.seek(index)
        image.load()
        if image.size != (header.width, header.height):
            raise PictureError(f"a damaged {header.format}: frame {index} has another size")
        milliseconds += image.info.get("duration", 0)
    fps = 1000 * num_frames / milliseconds if milliseconds else 0.0
    return Verdict("", header.width, header.height, MEDIA_TYPES[header.format], num_frames, fps)


def _judged_mp4(data: bytes) -> Verdict:
    """Return the finding on an MP4, whose header is checked before a frame is decoded for itself."""
    try:
        read_mp4(data)
        with open_mp4(data) as file:
            check_mp4(file.width, file.height, file.num_frames, file.seconds)
            num_frames = 0
            for num_frames, _ in enumerate(file.frames(), start=1):
                check_mp4(file.width, file.height, num_frames, 0.0)
            if num_frames < FEWEST_FRAMES:
                raise PictureError(f"an MP4 of {num_frames} frames; at least {FEWEST_FRAMES} are needed")
            return Verdict("", *file.shown_size, MP4_TYPE, num_frames, file.fps)
    except ImportError:
        return Verdict(MISSING)
    except (PictureError, Mp4Error) as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict(f"an MP4 that needs more than {MAX_MEMORY >> 20} MiB to be decoded")
    except Exception as error:  # whatever a decoder raises is the file's fault
        return Verdict(f"an MP4 that cannot be decoded ({type(error).__name__}); it is damaged or cut off")


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Decode what comes until nothing does."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    while len(length := source.read(1 + LENGTH_BYTES)) > LENGTH_BYTES:
        data = source.read(int.from_bytes(length[1:], "big"))
        sink.write(msgspec.json.encode(judged(data, length[:1])) + b"\n")
        sink.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
