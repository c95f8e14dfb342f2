"""Files of pictures, read with Pillow.

Owns: turning a file as its camera was held, RGB.  Does not know: models, limits, which formats clients may send.
"""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from engine.types.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
WRITTEN: Final = ("1", "L", "LA", "P", "RGB", "RGBA")  # modes that PNG files have
MOST_PIXELS: Final = 1 << 26
ORIENTATION: Final = 0x0112  # the tag of EXIF
TURNED: Final = (5, 6, 7, 8)  # its values for a picture whose sides are exchanged


def shown_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a picture as it is shown.  Raises RequestError.

    A PNG without EXIF before its pixels is decoded, since it may have it behind them."""
    picture = _opened(data)
    width, height = picture.size
    return (height, width) if _orientation(picture) in TURNED else (width, height)


def read_file(image: object) -> bytes:
    """Return the file of a picture that a program gives: its bytes, a path, or a PIL image.  Raises RequestError."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).expanduser().read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RequestError(f"messages: the picture {str(image)!r:.200} cannot be read: {reason}") from None
    if not hasattr(image, "save") or not hasattr(image, "mode"):
        raise RequestError(f"messages: a picture must be a path, bytes or a PIL image, not {image!r:.100}")
    return _written(cast("Image", image))


def _written(picture: "Image") -> bytes:
    """Return a PIL image as a file, turned as it is shown.  Raises RequestError."""
    from PIL import ImageOps

    try:
        upright, file = ImageOps.exif_transpose(picture), BytesIO()
        (upright if upright.mode in WRITTEN else upright.convert("RGB")).save(file, "PNG")
    except Exception as error:  # a file that is opened is read only here
        raise _unreadable(error) from None
    return file.getvalue()


def read_picture(data: bytes) -> "Image":
    """Return a picture, the first one of a film, in RGB.  Raises RequestError."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(_opened(data)).convert("RGB")
    except RequestError:
        raise
    except Exception as error:
        raise _unreadable(error) from None


def _orientation(picture: "Image") -> int:
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except Exception as error:
        raise _unreadable(error) from None


def _opened(data: bytes) -> "Image":
    from PIL import Image  # an optional package, which only pictures need

    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise _unreadable(error) from None
    if picture.width * picture.height > MOST_PIXELS:
        raise _unreadable(ValueError(f"{picture.width} x {picture.height} pixels are more than {MOST_PIXELS}"))
    return picture


def _unreadable(error: Exception) -> RequestError:
    """Return the error for a client.  error: Pillow raises errors of every kind for broken files."""
    formats = ", ".join(FORMATS)
    return RequestError(f"a picture cannot be read ({error}); it must be one of {formats}", param="messages")
