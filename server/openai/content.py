"""The content of a turn: text, and pictures in it as a client gives them until they are read.

Owns: where pictures stand, the ways to give one.  Does not know: how a picture is fetched or decoded, roles.
"""

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from engine.types.errors import FieldError
from engine.types.prompt import LEAST_FPS, ChatTurn, Picture

Given = Literal["base64", "address", "file"]
MAX_FPS: Final = 240
MAX_GIVEN_FRAMES: Final = 1 << 12  # in one data URI; a reader of films has a lower limit
DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


class GivenPicture(Picture, frozen=True):
    """A picture as a client gives it.  Its data, digest and size are empty until it is read.

    given: its base64, its address, or the id of a file, as ``kind`` says.  media_type: as declared, or empty.
    path: the field, for errors.  moves: whether it is a film.  frames, fps: of a film that is given as pictures."""

    kind: Given = "base64"
    given: str = ""
    media_type: str = ""
    path: str = ""
    moves: bool = False
    frames: "tuple[GivenPicture, ...]" = ()
    fps: float = 0.0

    @classmethod
    def of(
        cls, kind: Given, given: str, path: str, *, media_type: str = "", detail: str | None = None
    ) -> "GivenPicture":
        """Return a picture.  Raises RequestError for a detail that is not known."""
        if detail is not None and detail not in DETAILS:
            known = ", ".join(f"'{one}'" for one in DETAILS)
            raise FieldError(f"{path}.detail", f"'{detail[:40]}' is not known; it must be one of {known}")
        return cls(b"", "", 0, 0, DETAILS[detail or "auto"], None, kind, given, media_type.lower(), path)


class Content(NamedTuple):
    """Text with pictures in it.  places: for each picture, the number of characters before it."""

    text: str = ""
    pictures: tuple[Picture, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[str | Picture], between: str = "") -> "Content":
        """Return the content of pieces.  between: what separates two pieces of text."""
        texts: list[str] = []
        pictures: list[Picture] = []
        places: list[int] = []
        num_chars, follows_text = 0, False
        for piece in pieces:
            if isinstance(piece, Picture):
                pictures.append(piece)
                places.append(num_chars)
            else:
                texts.append(between + piece if follows_text else piece)
                num_chars += len(texts[-1])
            follows_text = isinstance(piece, str)
        return cls("".join(texts), tuple(pictures), tuple(places))

    def turn(self, role: str, **others: Any) -> ChatTurn:
        """Return a turn with this content.  others: its other fields."""
        return ChatTurn(role, self.text, pictures=self.pictures, places=self.places, **others)


def joined(before: ChatTurn, after: ChatTurn) -> ChatTurn:
    """Return two turns of one speaker as one; a line ends between two texts."""
    at_picture = len(before.content) in before.places[-1:] or 0 in after.places[:1]
    content = before.content + ("" if at_picture else "\n")
    return msgspec.structs.replace(
        before,
        content=content + after.content,
        pictures=before.pictures + after.pictures,
        places=before.places + tuple(len(content) + place for place in after.places),
    )


def read_address(url: Any, path: str, detail: str | None = None) -> GivenPicture:
    """Return the picture at a URL, or in a data URI.  Raises RequestError for what is neither."""
    if not isinstance(url, str):
        raise FieldError(path, "required as text: a data URI, or the address of a picture")
    if url[:5].lower() != "data:":
        return GivenPicture.of("address", url, path, detail=detail)
    head, comma, data = url[5:].partition(",")
    media_type, *parameters = head.split(";")
    if not comma or "base64" not in parameters:
        raise FieldError(path, "a data URI must begin with 'data:image/TYPE;base64,'")
    return GivenPicture.of("base64", data, path, media_type=media_type, detail=detail)


def read_film(given: Any, path: str, fps: Any = None) -> Picture:
    """Return the film at a URL, in a data URI, or of a list of these for its frames.  Raises RequestError.

    fps: frames a second of a list.  A data URI of the type video/jpeg has frames with commas between them, too."""
    if fps is not None and (
        isinstance(fps, bool) or not isinstance(fps, int | float) or not LEAST_FPS <= fps <= MAX_FPS
    ):
        raise FieldError(f"{path}.fps", f"must be a number of frames a second from {LEAST_FPS} to {MAX_FPS}")
    rate = float(fps or 0)
    if isinstance(given, list | tuple):
        frames = tuple(read_address(one, f"{path}[{index}]") for index, one in enumerate(given))
        if not frames:
            raise FieldError(path, "an empty list; expected the frames of the video")
        return GivenPicture(b"", "", 0, 0, path=path, moves=True, frames=frames, fps=rate)
    film = read_address(given, path)
    if film.media_type == "video/jpeg":
        pieces = film.given.split(",", MAX_GIVEN_FRAMES)
        frames = tuple(GivenPicture.of("base64", one, path, media_type="image/jpeg") for one in pieces)
        return GivenPicture(b"", "", 0, 0, path=path, moves=True, frames=frames, fps=rate)
    return msgspec.structs.replace(film, moves=True)
