"""The content of a turn: text, and pictures in it as a client gives them until they are read.

Owns: where pictures stand, the ways to give one.  Does not know: how a picture is fetched or decoded, roles.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from engine.types.errors import FieldError
from engine.types.prompt import ChatTurn, Picture

Given = Literal["base64", "address", "file"]
DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


class GivenPicture(Picture, frozen=True):
    """A picture as a client gives it.  Its data, digest and size are empty until it is read.

    given: its base64, its address, or the id of a file, as ``kind`` says.  media_type: as declared, or empty.
    path: the field, for errors."""

    kind: Given = "base64"
    given: str = ""
    media_type: str = ""
    path: str = ""

    @classmethod
    def of(cls, kind: Given, given: str, path: str, *, media_type: str = "", detail: str | None = None) -> Picture:
        """Return a picture.  Raises RequestError for a detail that is not known."""
        if detail is not None and detail not in DETAILS:
            known = ", ".join(f"'{one}'" for one in DETAILS)
            raise FieldError(f"{path}.detail", f"'{detail[:40]}' is not known; it must be one of {known}")
        return cls(b"", "", 0, 0, DETAILS[detail or "auto"], kind, given, media_type.lower(), path)


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


def read_address(url: Any, path: str, detail: str | None = None) -> Picture:
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
