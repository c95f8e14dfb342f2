"""The process that decodes pictures, to see whether they can be: ``python -m server.extensions.images.decoding``.

Owns: what it reads and writes, its memory.  Does not know: requests, the processes that it has beside it.
It reads a length of 8 bytes and a file, and writes a line of JSON, until its input ends.  A picture is decoded as
transformers' ``load_image`` does it, so that the engine can decode what passes here.
"""

import os
import resource
import sys
import warnings
from io import BytesIO
from typing import BinaryIO, Final

import msgspec

from server.extensions.images.header import MAX_PIXELS, PictureError, check_exif, read_header

LENGTH_BYTES: Final = 8
MAX_MEMORY: Final = 1 << 30
NICENESS: Final = 5  # the engine goes first
NOT_INSTALLED: Final = "not installed"
MEDIA_TYPES: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# Pillow names a JPEG with further pictures in it so.
SAME: Final = {"MPO": "JPEG"}


class Verdict(msgspec.Struct, frozen=True):
    """The finding on a picture.  problem: empty for a good one.  width, height: as it is shown, turned upright."""

    problem: str = ""
    width: int = 0
    height: int = 0
    media_type: str = ""


def judged(data: bytes) -> Verdict:
    """Return the finding on a picture, of which only the first frame is read."""
    try:
        header = read_header(data)
    except PictureError as error:
        return Verdict(str(error))
    try:
        from PIL import Image, ImageOps
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
            image.load()
            check_exif(header.format, len(image.info.get("exif", b"")))
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return Verdict(f"a {header.format} whose content has more than {MAX_PIXELS} pixels, unlike its header")
    except PictureError as error:
        return Verdict(str(error))
    except MemoryError:
        return Verdict(f"a {header.format} that needs more than {MAX_MEMORY >> 20} MiB to be decoded")
    except Exception as error:  # whatever a decoder raises is the file's fault
        return Verdict(f"a {header.format} that cannot be decoded ({type(error).__name__}); it is damaged or cut off")
    return Verdict("", *upright.size, MEDIA_TYPES[header.format])


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Decode what comes until nothing does."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    while len(length := source.read(LENGTH_BYTES)) == LENGTH_BYTES:
        data = source.read(int.from_bytes(length, "big"))
        sink.write(msgspec.json.encode(judged(data)) + b"\n")
        sink.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
