"""The messages of pictures: those to encode or to forget, a rank's answer, and the pictures of a step's new rows.

Owns: how they are encoded.  Does not know: when they are sent.
"""

import hashlib
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Admit, FeatureAnswer, FeatureRequest, Step
from engine.text.pictures import NAME, PlacedPicture, picture_ids, placed_pictures
from engine.types.prompt import RequestPart

NOT_ENCODED: Final = "a picture of this request cannot be encoded; the server log has the details"


class PictureFile(msgspec.Struct, frozen=True, array_like=True):
    """A picture to encode.  key, way: as in ``PlacedPicture``.  num_rows: number of its places."""

    key: str
    data: bytes
    num_rows: int
    way: str = ""


class EncodePicture(msgspec.Struct, frozen=True, array_like=True):
    """Forget the rows of pictures, then encode one.  picture: None for none."""

    picture: PictureFile | None
    forget: tuple[str, ...] = ()

    def message(self, number: int) -> FeatureRequest:
        """Return it as a message for every rank, whose answers have this number."""
        return FeatureRequest(feature=NAME, number=number, body=msgspec.msgpack.encode(self))

    @classmethod
    def of(cls, message: FeatureRequest) -> "EncodePicture":
        """Return the content of a message."""
        return msgspec.msgpack.decode(message.body, type=cls)


class PictureEncoded(msgspec.Struct, frozen=True, array_like=True):
    """A rank has encoded a picture, or could not.  reason: '' if it has.  status: of the error."""

    reason: str = ""
    status: int = 400

    def message(self, rank: int, number: int) -> FeatureAnswer:
        """Return it as a message for the planner."""
        return FeatureAnswer(rank=rank, feature=NAME, number=number, body=msgspec.msgpack.encode(self))

    @classmethod
    def of(cls, message: FeatureAnswer) -> "PictureEncoded":
        """Return the content of a message."""
        return msgspec.msgpack.decode(message.body, type=cls)


class RowPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture in a row's prompt.  key, places, grid, interval: as in ``PlacedPicture``."""

    key: str
    places: bytes
    grid: tuple[int, int, int]
    interval: float = 1.0

    @property
    def places_n(self) -> npt.NDArray[np.int32]:
        """The positions as an array, ascending."""
        return np.frombuffer(self.places, dtype=np.int32)

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether one of its places is among these positions."""
        first, last = np.searchsorted(self.places_n, (start, end))
        return bool(first < last)

    @classmethod
    def of(cls, picture: PlacedPicture) -> "RowPicture":
        """Return a picture without its file."""
        return cls(picture.key, picture.places, picture.grid, picture.interval)


RowPictures = dict[int, tuple[RowPicture, ...]]
"""The pictures of each row that a step admits and that has any."""

_rows: Final = msgspec.msgpack.Decoder(RowPictures)


def part_of(pictures: RowPictures) -> dict[str, bytes]:
    """Return the parts of a step that admits rows with these pictures."""
    return {NAME: msgspec.msgpack.encode(pictures)}


def pictures_of(step: Step) -> RowPictures:
    """Return the pictures of a step's new rows."""
    return _rows.decode(part) if (part := step.parts.get(NAME)) is not None else {}


def sentence(message: FeatureRequest | FeatureAnswer) -> str:
    """Return a message in words."""
    if isinstance(message, FeatureRequest):
        wanted = EncodePicture.of(message)
        forget = f"forget {len(wanted.forget)} pictures"
        return forget if wanted.picture is None else f"encode {wanted.picture.num_rows} tokens, {forget}"
    reason = PictureEncoded.of(message).reason
    return f"picture {message.number} on rank {message.rank}: {reason or 'encoded'}"


def planned_with(part: RequestPart) -> RequestPart:
    """Return the part of a request without the files of pictures."""
    pictures = [msgspec.structs.replace(one, data=b"") for one in placed_pictures(part)]
    return RequestPart(part.digest, msgspec.msgpack.encode(pictures))


def hidden(message: Admit, secret: bytes) -> Admit:
    """Return a request whose pictures have other keys and ids, those of equal pictures equal.

    secret: without it no reader can find out which picture a key is of."""
    part = message.parts[NAME]
    token_ids, pictures = np.frombuffer(message.token_ids, dtype=np.int32).copy(), []
    for one in placed_pictures(part):
        key = hashlib.blake2b(one.key.encode(), key=secret, digest_size=len(one.key) // 2).hexdigest()
        token_ids[one.places_n] = picture_ids(key, len(one.places_n))
        pictures.append(msgspec.structs.replace(one, key=key))
    parts = message.parts | {NAME: RequestPart(part.digest, msgspec.msgpack.encode(pictures))}
    return msgspec.structs.replace(message, token_ids=token_ids.tobytes(), parts=parts)


def without_tokens(part: bytes) -> bytes:
    """Return the part of a step without the keys of pictures, which follow from their content."""
    pictures = {
        row: tuple(msgspec.structs.replace(one, key="") for one in given) for row, given in _rows.decode(part).items()
    }
    return msgspec.msgpack.encode(pictures)


def without_content(body: bytes) -> bytes:
    """Return the body of a request to the ranks without the file of the picture."""
    wanted = msgspec.msgpack.decode(body, type=EncodePicture)
    if wanted.picture is not None:
        wanted = msgspec.structs.replace(wanted, picture=msgspec.structs.replace(wanted.picture, data=b""))
    return msgspec.msgpack.encode(wanted)
