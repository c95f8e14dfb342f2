"""The reading of a request's pictures: had, checked and decoded once, all within one request's limits.

Owns: the limits of a request, what is remembered of pictures, errors by the names of fields.
Does not know: how a picture is given in an API, HTTP, decoding.
"""

import asyncio
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import msgspec

from engine.settings.sections import ServerSection
from engine.text.film_files import FEWEST_FRAMES, FilmFile
from engine.types.errors import FieldError, RequestError
from engine.types.prompt import ChatTurn, Film, Picture
from server.extensions.images.decoders import Decoders
from server.extensions.images.decoding import FILM, MP4_TYPE, NOT_INSTALLED, PICTURE, Verdict
from server.extensions.images.header import MAX_FRAMES, MAX_MP4_PIXELS, PictureError
from server.extensions.images.media import Media
from server.extensions.storage.files import Files
from server.extensions.storage.store import Store
from server.http.bodies import Bodies
from server.http.exchange import Exchange
from server.openai.content import GivenPicture

T = TypeVar("T")
MAX_PICTURES: Final = 100
MAX_REQUEST_PIXELS: Final = 256_000_000
MOST_REMEMBERED: Final = 4096
LARGE_BYTES: Final = 64 << 10  # from here on a thread decodes base64 and hashes
PIECE_CHARS: Final = 256 << 10  # of base64, a multiple of 4
SAME_TYPES: Final = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}
MISSING: Final = (
    "pictures cannot be decoded here: Pillow is missing; the operator installs it with pip install 'callboard[images]'"
)


class _Budget:
    """The bytes and pixels of one request's pictures.  hold: called with all bytes that are kept."""

    def __init__(self, most_bytes: int, exchange: Exchange, server: ServerSection) -> None:
        self._most_bytes = most_bytes
        self._share = (exchange.bodies or Bodies()).share(exchange.client, server)
        self._num_bytes: dict[str, int] = {}
        self._num_pixels = self._num_mp4_pixels = 0

    def count(self, path: str, num_bytes: int) -> None:
        """Count a file as so long.  Raises PictureError, and RequestError (429) where too much is under way."""
        self._num_bytes[path] = max(num_bytes, self._num_bytes.get(path, 0))
        if (total := sum(self._num_bytes.values())) > self._most_bytes:
            raise PictureError(
                f"{num_bytes} bytes; all pictures of a request that are fetched or stored may have {self._most_bytes} "
                "(server.max_body_bytes): scale them down"
            )
        self._share.hold(total)

    def add_pixels(self, verdict: Verdict) -> None:
        """Count a picture's pixels; those of MP4s by themselves, of which few are kept.  Raises PictureError."""
        if verdict.media_type == MP4_TYPE:
            self._num_mp4_pixels += verdict.width * verdict.height * verdict.num_frames
            if self._num_mp4_pixels > MAX_MP4_PIXELS:
                raise PictureError(
                    f"the request's MP4s have {self._num_mp4_pixels} pixels; at most {MAX_MP4_PIXELS} are allowed: "
                    "scale them down"
                )
            return
        self._num_pixels += verdict.width * verdict.height * max(1, verdict.num_frames)
        if self._num_pixels > MAX_REQUEST_PIXELS:
            raise PictureError(
                f"{verdict.width} x {verdict.height} pixels make {self._num_pixels} of the request's pictures; at most "
                f"{MAX_REQUEST_PIXELS} are allowed: scale them down"
            )

    def close(self) -> None:
        """Hold nothing more."""
        self._share.close()


class PictureSight:
    """Reads pictures.  store: of uploaded files; None where there are none."""

    def __init__(self, decoders: Decoders, media: Media, store: Store | None, server: ServerSection) -> None:
        self._decoders = decoders
        self._media = media
        self._store = store
        self._server = server
        self._good: OrderedDict[str, Verdict] = OrderedDict()

    async def read(self, turns: tuple[ChatTurn, ...], exchange: Exchange) -> tuple[ChatTurn, ...]:
        """Return a conversation whose pictures are read.  Raises RequestError: 400, 404, 429, 501 or 503."""
        given = [picture for turn in turns for picture in turn.pictures if isinstance(picture, GivenPicture)]
        if not given:
            return turns
        if len(given) > MAX_PICTURES:
            raise FieldError(
                given[MAX_PICTURES].path,
                f"the request has {len(given)} pictures; at most {MAX_PICTURES} are allowed",
                code="too_many_images",
            )
        with closing(_Budget(self._server.max_body_bytes, exchange, self._server)) as budget:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._named(one, exchange, budget), name=one.path) for one in given]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        read = (task.result() for task in tasks)
        return tuple(
            msgspec.structs.replace(turn, pictures=tuple(islice(read, len(turn.pictures)))) if turn.pictures else turn
            for turn in turns
        )

    async def _named(self, given: GivenPicture, exchange: Exchange, budget: _Budget) -> Picture:
        try:
            if given.frames:
                return await self._film(given, exchange, budget)
            return await self._read(given, exchange, budget)
        except PictureError as error:
            raise FieldError(given.path, str(error), code="invalid_image") from None

    async def _read(self, given: GivenPicture, exchange: Exchange, budget: _Budget) -> Picture:
        count = partial(budget.count, given.path)
        declared = given.media_type
        match given.kind:
            case "base64":
                data = await _elsewhere(len(given.given), partial(_decoded, given.given))
            case "address":
                data, declared = await self._media.fetch(given.given, exchange.client, count)
            case "file":
                data = await self._stored("" if exchange.key is None else exchange.key.owner, given, count)
        digest = await _elsewhere(len(data), lambda: hashlib.sha256(data).hexdigest())
        verdict = await self._judge(data, digest, exchange.client, FILM if given.moves else PICTURE)
        if verdict.problem == NOT_INSTALLED:
            raise RequestError(MISSING, status=501, code="images_not_installed", param=given.path)
        if verdict.problem:
            raise PictureError(verdict.problem)
        declared = SAME_TYPES.get(declared, declared)
        if declared.startswith("image/") and declared != verdict.media_type:
            raise PictureError(f"declared as {declared[:40]}, but it is {verdict.media_type}")
        budget.add_pixels(verdict)
        if given.moves:
            film = FilmFile(Film(verdict.num_frames, verdict.fps), (data,))
            return await _packed(film, verdict.width, verdict.height)
        return Picture(data, digest, verdict.width, verdict.height, given.detail)

    async def _film(self, given: GivenPicture, exchange: Exchange, budget: _Budget) -> Picture:
        """Return the film of pictures, which are read one by one."""
        if len(given.frames) > MAX_FRAMES:
            raise PictureError(f"a video of more than {MAX_FRAMES} frames; leave some out")
        frames = [await self._named(one, exchange, budget) for one in given.frames]
        sizes = sorted({(one.width, one.height) for one in frames})
        if len(sizes) > 1 or len(frames) < FEWEST_FRAMES:
            found = " and ".join(f"{width} x {height}" for width, height in sizes)
            raise PictureError(
                f"a video of {len(frames)} frames of {found} pixels; it must have at least {FEWEST_FRAMES} frames, all "
                "of one size"
            )
        film = FilmFile(Film(len(frames), given.fps, are_chosen=True), tuple(one.data for one in frames))
        return await _packed(film, *sizes[0])

    async def _judge(self, data: bytes, digest: str, client: str, kind: bytes) -> Verdict:
        """Return the finding on a picture, which conversations send again with every turn."""
        name = f"{kind.decode()} {digest}"
        if (known := self._good.get(name)) is not None:
            self._good.move_to_end(name)
            return known
        verdict = await self._decoders.judge(data, client, kind)
        if not verdict.problem:
            self._good[name] = verdict
            if len(self._good) > MOST_REMEMBERED:
                self._good.popitem(last=False)
        return verdict

    async def _stored(self, owner: str, given: GivenPicture, count: partial[None]) -> bytes:
        if self._store is None:
            raise PictureError("the id of a file, and this server keeps none (storage.folder); send a data URI")
        try:
            file = await Files(self._store).get(owner, given.given)
        except RequestError as error:
            error.param = given.path
            raise
        count(file.bytes)
        try:
            return await asyncio.to_thread(self._store.content(file.id).read_bytes)
        except OSError:
            raise PictureError("its content is gone from the server's disk; upload it again") from None


async def _packed(film: FilmFile, width: int, height: int) -> Picture:
    """Return a film as the engine gets it."""
    num_bytes = sum(map(len, film.files))
    data = await _elsewhere(num_bytes, film.packed)
    digest = await _elsewhere(num_bytes, lambda: hashlib.sha256(data).hexdigest())
    return Picture(data, digest, width, height, film=film.film)


def _decoded(given: str) -> bytes:
    """Return what base64 stands for, in pieces between which other threads run.  Raises PictureError."""
    try:
        encoded = given.encode("ascii")
        if b"\n" in encoded:
            encoded = encoded.translate(None, b"\r\n")
        pieces = (encoded[at : at + PIECE_CHARS] for at in range(0, len(encoded), PIECE_CHARS))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except (UnicodeEncodeError, binascii.Error) as error:
        reason = "it has other characters" if isinstance(error, UnicodeEncodeError) else str(error).lower()
        raise PictureError(f"not valid base64 ({reason})") from None


async def _elsewhere(num_bytes: int, work: Callable[[], T]) -> T:
    """Return what work does, in a thread where there is much of it."""
    return await asyncio.to_thread(work) if num_bytes > LARGE_BYTES else work()
