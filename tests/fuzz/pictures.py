"""Foreign bytes as the header of a picture.

Owns: nothing more than what a header promises.
"""

from pathlib import Path

from server.extensions.images.header import MAX_PIXELS, PictureError, read_header


def read(data: bytes, folder: Path) -> None:
    """Returns, or raises what is a finding."""
    try:
        header = read_header(data)
    except PictureError:
        return
    assert 0 < header.width * header.height <= MAX_PIXELS
