"""Files that are meant to harm what reads pictures, as many as are wanted, from a seed.

Owns: the ways to harm, and which of them must be refused.  What is damaged by chance may still be a picture.
"""

import random
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from typing import NamedTuple

from PIL import Image

from tests.extensions.images.pictures import picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
OTHERS = (
    b"", b"\0", b"GIF8", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<!doctype html>", b"%PDF-1.7\n%%EOF",
    b"BM" + bytes(60), b"II*\0" + bytes(60), b"MM\0*" + bytes(60), b"\0\0\1\0\1\0" + bytes(60),
    b"8BPS" + bytes(60), b"PK\3\4" + bytes(60), b"\x7fELF" + bytes(60), b"\0\0\0\x20ftypheic" + bytes(60),
    b"\0\0\0\x20ftypavif" + bytes(60), b"RIFF\x40\0\0\0WAVEfmt " + bytes(60), b"\x1f\x8b\x08" + bytes(60),
    b"P6 9999 9999 255\n", b"%!PS-Adobe EPSF\n",
)  # fmt: skip


class Hostile(NamedTuple):
    """A file.  refused: it must be; None where it may be a picture.  moves: it is sent as a video."""

    kind: str
    data: bytes
    media_type: str = ""
    refused: bool | None = True
    moves: bool = False

    @property
    def field(self) -> str:
        """The field that it is sent in."""
        return "video_url" if self.moves else "image_url"


def hostile(count: int, seed: int) -> Iterator[Hostile]:
    """Yield files of each kind in turn."""
    rng = random.Random(seed)
    for number in range(count):
        yield KINDS[number % len(KINDS)](rng)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@cache
def _packed() -> bytes:
    return zlib.compress(bytes(64 << 20), 1)


def _png(width: int, height: int, content: bytes, depth: int = 8, color: int = 2, before: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = _chunk(b"IHDR", header) + before + _chunk(b"IDAT", content) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _cut(rng: random.Random) -> Hostile:
    whole = picture(rng.choice(FORMATS), (rng.randrange(32, 96), rng.randrange(32, 96)))
    data = whole[: rng.randrange(4, len(whole) * 3 // 4)].rstrip(b"\x3b")
    return Hostile("cut off", data)


def _bomb(rng: random.Random) -> Hostile:
    side = rng.randrange(7000, 65535)
    content = zlib.compress(bytes(1 << 20))
    webp = b"WEBPVP8X\x0a\0\0\0\0\0\0\0" + struct.pack("<I", 16382)[:3] * 2 + bytes(30)
    return Hostile("bomb", rng.choice([
        _png(side, side, content),
        _png(0x7FFFFFFF, rng.randrange(20, 99), content),
        b"GIF89a" + struct.pack("<HH", side, side) + bytes(20) + b"\x3b",
        b"RIFF" + struct.pack("<I", len(webp)) + webp,
    ]))  # fmt: skip


def _short(rng: random.Random) -> Hostile:
    """Less than its size says."""
    return Hostile("content too short", _png(3000, 3000, zlib.compress(bytes(rng.randrange(9000)))))


def _larger_inside(rng: random.Random) -> Hostile:
    """A GIF whose frame is larger than the picture."""
    data = bytearray(picture("GIF", (16, 16)))
    at = data.index(b"\x2c")
    data[at + 5 : at + 9] = struct.pack("<HH", rng.randrange(9000, 65535), rng.randrange(9000, 65535))
    return Hostile("larger inside", bytes(data))


def _other(rng: random.Random) -> Hostile:
    data = rng.choice(OTHERS) + rng.randbytes(rng.randrange(64))
    return Hostile("another type", data, rng.choice(("", "image/png", "image/jpeg")))


def _polyglot(rng: random.Random) -> Hostile:
    tail = rng.choice((b"PK\5\6" + bytes(18), b"<script>alert(1)</script>", b"%PDF-1.7\n", rng.randbytes(9) + b"\1"))
    return Hostile("polyglot", picture(rng.choice(("PNG", "WEBP", "GIF"))) + tail)


def _contradicted(rng: random.Random) -> Hostile:
    form, said = rng.sample(FORMATS, 2)
    return Hostile("contradicted", picture(form), TYPES[said])


def _inflated(rng: random.Random) -> Hostile:
    """Metadata that unpacks to 64 MiB, several times."""
    kinds = ((b"iCCP", b"icc\0\0"), *[(b"zTXt", b"Comment\0\0")] * rng.randrange(2, 9))
    before = b"".join(_chunk(kind, named + _packed()) for kind, named in rng.sample(kinds, len(kinds)))
    return Hostile("inflated metadata", _png(8, 8, zlib.compress(bytes(200)), before=before))


def _directory(rng: random.Random) -> bytes:
    """Entries that are endless, point to themselves, or claim more than there is."""
    num = rng.choice((1, 200, 65535))
    entry = struct.pack("<HHII", 0x8769, rng.choice((2, 3, 4, 7)), rng.choice((1, 0xFFFFFFFF)), 8)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", num) + entry * min(num, 4000) + struct.pack("<I", 8)


def _exif(rng: random.Random) -> Hostile:
    body = b"Exif\0\0" + _directory(rng)
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    jpeg = picture("JPEG", (24, 24))
    return Hostile("exif", jpeg[:2] + segment + jpeg[2:], refused=None)


def _much_exif(rng: random.Random) -> Hostile:
    """So much that to read it takes long."""
    exif = (b"Exif\0\0" + _directory(rng)).ljust(60000, b"\0")
    segments = (b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif) * rng.randrange(3, 50)
    jpeg = picture("JPEG", (24, 24))
    at = rng.choice((2, jpeg.index(b"\xff\xda")))
    png = _png(8, 8, zlib.compress(bytes(200)), before=_chunk(b"eXIf", exif[6:] * rng.randrange(3, 50)))
    webp = picture("WEBP", exif=exif * rng.randrange(3, 50))
    return Hostile("much exif", rng.choice((jpeg[:at] + segments + jpeg[at:], png, webp)))


def _deep(rng: random.Random) -> Hostile:
    color, samples = rng.choice(((0, 1), (2, 3), (4, 2), (6, 4)))
    return Hostile("16 bits", _png(8, 8, zlib.compress(bytes(8 * (1 + 16 * samples))), 16, color))


def _cmyk(rng: random.Random) -> Hostile:
    return Hostile("cmyk", picture("JPEG", (rng.randrange(16, 48), 16), "CMYK"))


def _thin(rng: random.Random) -> Hostile:
    size = rng.choice(((1, 1), (1, 20000), (20000, 1), (3, 64), (4, 20000), (0, 5)))
    rows = zlib.compress(bytes(size[1] * (1 + 3 * size[0])))
    return Hostile("sides", _png(*size, rows))


def _flipped(rng: random.Random) -> Hostile:
    data = bytearray(picture(rng.choice(FORMATS), (48, 48)))
    for _ in range(rng.randrange(1, 40)):
        data[rng.randrange(8, len(data))] = rng.randrange(256)
    return Hostile("bits flipped", bytes(data), refused=None)


def _many_parts(rng: random.Random) -> Hostile:
    """A JPEG of many scans, or of many segments before its size, or a PNG of many chunks."""
    jpeg = picture("JPEG", (64, 64), progressive=True)
    at = jpeg.rindex(b"\xff\xda")
    scans = jpeg[:at] + jpeg[at:-2] * rng.randrange(300, 900) + jpeg[-2:]
    comments = jpeg[:2] + b"\xff\xfe\0\2" * rng.randrange(5000, 50000) + jpeg[2:]
    chunks = _png(8, 8, zlib.compress(bytes(200)), before=_chunk(b"prVt", b"") * rng.randrange(9000, 90000))
    return Hostile("many parts", rng.choice((scans, comments, chunks)))


def _film(form: str, count: int, size: tuple[int, int]) -> bytes:
    """Frames that differ, of a file that moves."""
    first, *others = (Image.new("RGB", size, (number % 256, number // 256, 9)) for number in range(count))
    file = BytesIO()
    first.save(file, form, save_all=True, append_images=others, duration=40)
    return file.getvalue()


@cache
def _long_films() -> tuple[bytes, ...]:
    """Films of small files whose frames are too many, or too large together."""
    return _film("GIF", 900, (8, 8)), _film("GIF", 30, (1600, 1400)), _film("PNG", 800, (8, 8))


def _bomb_film(rng: random.Random) -> Hostile:
    data = rng.choice(_long_films())
    if rng.random() < 0.3:  # a PNG that says that it has four thousand million frames
        film = bytearray(_film("PNG", 3, (8, 8)))
        at = film.index(b"acTL") + 4
        film[at : at + 4] = b"\xff" * 4
        film[at + 8 : at + 12] = struct.pack(">I", zlib.crc32(film[at - 4 : at + 8]))
        data = bytes(film)
    return Hostile("film too long", data, moves=True)


def _larger_later(rng: random.Random) -> Hostile:
    """A GIF of which a later frame is larger than the first."""
    data = bytearray(_film("GIF", 4, (16, 16)))
    at = data.rindex(b"\x2c\0\0\0\0")
    data[at + 5 : at + 9] = struct.pack("<HH", rng.randrange(9000, 65535), rng.randrange(9000, 65535))
    return Hostile("larger later", bytes(data), moves=True)


def _broken_film(rng: random.Random) -> Hostile:
    data = bytearray(_film(rng.choice(("GIF", "WEBP", "PNG")), rng.randrange(2, 9), (24, 24)))
    for _ in range(rng.randrange(1, 40)):
        data[rng.randrange(8, len(data))] = rng.randrange(256)
    return Hostile("film with flipped bits", bytes(data), refused=None, moves=True)


def _no_film(rng: random.Random) -> Hostile:
    containers = (
        b"\0\0\0\x18ftypmp42" + bytes(60),
        b"\x1aE\xdf\xa3" + bytes(60),
        b"RIFF\x40\0\0\0AVI LIST" + bytes(60),
    )
    still = (picture(form) for form in FORMATS)
    return Hostile("no film", rng.choice((*containers, *still, *OTHERS)), moves=True)


KINDS = (
    _cut, _bomb, _short, _larger_inside, _other, _polyglot, _contradicted, _inflated, _exif, _much_exif, _deep, _cmyk,
    _thin, _flipped, _many_parts, _bomb_film, _larger_later, _broken_film, _no_film,
)  # fmt: skip
