"""The headers of picture files: format and size, from the first bytes and without decoding.

Owns: which formats are read, and the limits that a header shows.  Does not know: Pillow, requests.
The size that a header states is checked again by the decoder, which may read another one.
"""

from typing import Final, NamedTuple

from engine.types.errors import CallboardError

MAX_PIXELS: Final = 40_000_000
MAX_FRAMES: Final = 768
MAX_FILM_PIXELS: Final = 64_000_000  # of all frames of a file that moves
MAX_MP4_FRAMES: Final = 18_000
MAX_MP4_S: Final = 600
MAX_MP4_PIXELS: Final = 1_000_000_000  # of all frames, which are decoded; few of them are kept
MIN_SIDE: Final = 4  # image processors take an array with three rows or one for channels
MAX_RATIO: Final = 200  # of the sides: the most that image processors take
MAX_SCANS: Final = 200  # of a JPEG
MAX_SCANNED_PIXELS: Final = 640_000_000  # of a JPEG: each scan costs a pass over all pixels; usual ones have up to 16
MAX_SEGMENTS: Final = 4096
MAX_EXIF_BYTES: Final = 128 << 10  # which are read entry by entry
LEAST_CHUNK_BYTES: Final = 1024  # of a PNG, in the mean
EXIF: Final = b"Exif\0\0"
PNG: Final = b"\x89PNG\r\n\x1a\n"
PNG_END: Final = b"\0\0\0\0IEND\xaeB`\x82"
JPEG: Final = b"\xff\xd8\xff"
GIF: Final = (b"GIF87a", b"GIF89a")
SIZES_OF_JPEG: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
ALONE: Final = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
START_OF_SCAN, END_OF_JPEG = 0xDA, 0xD9
FORMATS: Final = "PNG, JPEG, WebP and GIF"


class PictureError(CallboardError):
    """A picture cannot be read, or is beyond a limit.  The message follows the name of the field."""


class PictureHeader(NamedTuple):
    """The facts in a header.  format: as Pillow names it."""

    format: str
    width: int
    height: int

    def check(self) -> None:
        """Raise PictureError for a size that is beyond a limit."""
        size = f"{self.width} x {self.height} pixels"
        if self.width * self.height > MAX_PIXELS:
            raise PictureError(f"{size}; at most {MAX_PIXELS} pixels are allowed: scale it down")
        short, long = sorted((self.width, self.height))
        if short < MIN_SIDE:
            raise PictureError(f"{size}; each side must have at least {MIN_SIDE}")
        if long > MAX_RATIO * short:
            raise PictureError(f"{size}; the longer side may have at most {MAX_RATIO} times the shorter one's pixels")


def read_header(data: bytes) -> PictureHeader:
    """Return a picture's header.  Raises PictureError for another format, for damage, and beyond limits."""
    if data.startswith(PNG):
        header = _png(data)
    elif data.startswith(JPEG):
        header = _jpeg(data)
    elif data.startswith(GIF):
        header = _gif(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = _webp(data)
    else:
        begins = f"it begins with {data[:8].hex(' ')}" if data else "it is empty"
        raise PictureError(f"not a picture of a known format ({begins}); {FORMATS} are read")
    header.check()
    return header


def check_frames(name: str, num_frames: int, num_pixels: int) -> None:
    """Raise PictureError for a file that does not move, or has too many frames.  num_pixels: of a frame."""
    if num_frames < 2:
        raise PictureError(f"a {name} of one frame; send it as a picture")
    if num_frames > MAX_FRAMES:
        raise PictureError(f"a {name} of {num_frames} frames; at most {MAX_FRAMES} are allowed: leave some out")
    if (total := num_frames * num_pixels) > MAX_FILM_PIXELS:
        raise PictureError(
            f"a {name} whose {num_frames} frames have {total} pixels; at most {MAX_FILM_PIXELS} are allowed: scale "
            "it down, or leave frames out"
        )


def check_mp4(width: int, height: int, num_frames: int, seconds: float) -> None:
    """Raise PictureError for an MP4 beyond a limit.  num_frames, seconds: 0 if they are not known yet."""
    PictureHeader("MP4", width, height).check()
    if num_frames > MAX_MP4_FRAMES:
        raise PictureError(f"an MP4 of more than {MAX_MP4_FRAMES} frames; cut it, or lower its rate")
    if seconds > MAX_MP4_S:
        raise PictureError(f"an MP4 of {seconds:.0f} seconds; at most {MAX_MP4_S} are allowed: cut it")
    if (total := num_frames * width * height) > MAX_MP4_PIXELS:
        raise PictureError(
            f"an MP4 whose {num_frames} frames have {total} pixels; at most {MAX_MP4_PIXELS} are allowed: scale it "
            "down, or lower its rate"
        )


def read_mp4(data: bytes) -> None:
    """Check that a file consists of whole boxes, and of nothing else.  Raises PictureError."""
    at = 0
    for _ in range(MAX_SEGMENTS):
        if at == len(data):
            return
        size, least = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:
            size, least = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        elif size == 0:
            size = len(data) - at  # the last one, up to the end
        if size < least or not data[at + 4 : at + 8].isalnum():
            raise PictureError("an MP4 with other data between its parts, or behind them; send the video alone")
        at += size
        if at > len(data):
            raise _cut("MP4")
    raise PictureError(f"an MP4 of more than {MAX_SEGMENTS} parts")


def check_exif(name: str, num_bytes: int) -> None:
    """Raise PictureError for more EXIF than a picture may have.  name: of its format."""
    if num_bytes > MAX_EXIF_BYTES:
        raise PictureError(f"a {name} with {num_bytes} bytes of EXIF; at most {MAX_EXIF_BYTES} are allowed")


def _png(data: bytes) -> PictureHeader:
    if len(data) < 33 or data[8:16] != b"\0\0\0\x0dIHDR":
        raise _cut("PNG")
    depth = data[24]
    if depth == 16:
        raise PictureError("a PNG of 16 bits a channel; at most 8 are allowed: convert it to 8")
    if not data.endswith(PNG_END):
        whole = data.rfind(PNG_END) < 0
        raise _cut("PNG") if whole else PictureError("a PNG with other data behind its end; send the picture alone")
    at, most = len(PNG), MAX_SEGMENTS + len(data) // LEAST_CHUNK_BYTES
    for _ in range(most):
        if at >= len(data):
            break
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    else:
        raise PictureError(f"a PNG of {len(data)} bytes with more than {most} chunks")
    return PictureHeader("PNG", int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))


def _jpeg(data: bytes) -> PictureHeader:
    at, exif_bytes = 2, 0
    frame: bytes | None = None
    for _ in range(MAX_SEGMENTS):
        if at + 4 > len(data):
            raise _cut("JPEG")
        if data[at] != 0xFF:
            raise PictureError("a damaged JPEG: its segments do not follow each other")
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xFF or marker in ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker in (START_OF_SCAN, END_OF_JPEG):
            if frame is None:
                raise PictureError("a damaged JPEG: its size is missing")
            return _jpeg_frame(data, frame)
        if marker in SIZES_OF_JPEG and frame is None:
            frame = data[at + 4 : at + 10]
        elif data[at + 4 : at + 10] == EXIF:
            exif_bytes += length
            check_exif("JPEG", exif_bytes)
        at += 2 + max(length, 2)
    raise PictureError(f"a JPEG with more than {MAX_SEGMENTS} segments before its first scan")


def _jpeg_frame(data: bytes, frame: bytes) -> PictureHeader:
    if len(frame) < 6:
        raise _cut("JPEG")
    bits, num_channels = frame[0], frame[5]
    if bits != 8:
        raise PictureError(f"a JPEG of {bits} bits a channel; 8 are allowed: convert it")
    if num_channels not in (1, 3):
        raise PictureError(f"a JPEG of {num_channels} channels (4 are CMYK); 1 or 3 are allowed: convert it to RGB")
    if (num_scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise PictureError(f"a JPEG of {num_scans} scans; at most {MAX_SCANS} are allowed")
    width, height = int.from_bytes(frame[3:5], "big"), int.from_bytes(frame[1:3], "big")
    if num_scans * width * height > MAX_SCANNED_PIXELS:
        raise PictureError(
            f"a JPEG of {num_scans} scans over {width} x {height} pixels; scans times pixels may be "
            f"{MAX_SCANNED_PIXELS} at most: save it without progressive steps"
        )
    return PictureHeader("JPEG", width, height)


def _gif(data: bytes) -> PictureHeader:
    if len(data) < 14:
        raise _cut("GIF")
    if not data.endswith(b"\x3b"):
        raise PictureError("a GIF that does not end as one: it is cut off, or other data follows")
    return PictureHeader("GIF", int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little"))


def _webp(data: bytes) -> PictureHeader:
    size = int.from_bytes(data[4:8], "little") + 8
    if len(data) < max(size, 30):
        raise _cut("WebP")
    if len(data) > size + size % 2:
        raise PictureError("a WebP with other data behind its end; send the picture alone")
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        width, height = (int.from_bytes(body[at : at + 3], "little") + 1 for at in (4, 7))
    elif kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))
    else:
        raise PictureError("a damaged WebP: it does not begin with a picture")
    return PictureHeader("WEBP", width, height)


def _cut(name: str) -> PictureError:
    return PictureError(f"a {name} that is cut off")
