"""Pictures in prompts: the text that stands for each, and the token ids at its places.

Owns: the ids of a picture's tokens, their places, the part of a request that has the pictures.
Does not know: families, files, how a picture is computed.

A picture's tokens have ids past every vocabulary, which follow from its content, the settings of its encoder and the
token's number.  So whatever compares prompts by their ids, the cache first, shares a picture's tokens where the picture
is the same, and only there.  A rank replaces the ids by the model's own token before it computes.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engine.types.errors import RequestError
from engine.types.prompt import Picture, RequestPart

Int32 = npt.NDArray[np.int32]

NAME: Final = "images"
FIRST_ID: Final = 1 << 30
"""The first id of pictures' tokens; no vocabulary is as large."""
FEWEST_TOKENS: Final = 4
"""The fewest tokens of a picture, and of a page.  An id has 30 bits, and a search finds a file for one chosen id."""


class PictureLayout(NamedTuple):
    """The place that a picture takes in a prompt, known before it is computed.

    text: stands for the picture, with the model's token at each of its places.  num_rows: number of these.
    grid: frames, lines and columns of the places, for a model whose positions have three axes; else zeros.
    way: a name for its encoder, of the way to encode it; '' for the usual one."""

    text: str
    num_rows: int
    grid: tuple[int, int, int] = (0, 0, 0)
    way: str = ""


class PictureFormat(Protocol):
    """The format in which a model takes pictures.

    placeholder: text that chat templates write for a picture.  token: text of the token at its places.
    settings: digest of all but the picture that its rows depend on.
    whole: whether each token of a picture attends to all of the picture."""

    placeholder: str
    token: str
    settings: str
    whole: bool

    def layout(self, width: int, height: int, detail: str) -> PictureLayout:
        """Return the layout of a picture of so many pixels, as it is shown.  detail: 'auto', 'low' or 'high'.

        Raises RequestError if the model cannot take it."""
        ...


class PlacedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture in a prompt.

    key: digest of its content and of its encoder's settings and way.  data: the file.  places: int32[n], positions in
    the prompt.  grid, way: as in ``PictureLayout``.  whole: as in ``PictureFormat``."""

    key: str
    data: bytes
    places: bytes
    grid: tuple[int, int, int]
    whole: bool
    way: str = ""

    @property
    def places_n(self) -> Int32:
        """The positions as an array, ascending."""
        return np.frombuffer(self.places, dtype=np.int32)

    @property
    def start(self) -> int:
        """The first position."""
        return int(self.places_n[0])

    @property
    def end(self) -> int:
        """The position after the last one."""
        return int(self.places_n[-1]) + 1


_placed = msgspec.msgpack.Decoder(tuple[PlacedPicture, ...])


def placed_pictures(part: RequestPart) -> tuple[PlacedPicture, ...]:
    """Return the pictures of a request's part, in the order of their places."""
    return _placed.decode(part.data)


class PictureText:
    """The pictures in a model's prompts.  token_id: of the format's token."""

    def __init__(self, form: PictureFormat, token_id: int) -> None:
        self._form = form
        self._token_id = token_id

    @classmethod
    def of(cls, form: PictureFormat, tokenizer: Tokenizer) -> "PictureText | None":
        """Return the pictures of a model; None if its tokenizer lacks the token."""
        token_id = tokenizer.token_to_id(form.token)
        return None if token_id is None else cls(form, token_id)

    def spread(self, text: str, pictures: Sequence[Picture]) -> tuple[str, list[PictureLayout]]:
        """Return the text of a conversation with each picture's own in place of the placeholder, and the layouts."""
        form = self._form
        layouts = [self._layout(one) for one in pictures]
        pieces = text.split(form.placeholder)
        if len(pieces) != len(pictures) + 1:
            raise RequestError(
                f"messages: the model's chat template writes {form.placeholder!r} {len(pieces) - 1} times for "
                f"{len(pictures)} pictures; a text must not have it, and each picture must be in a turn that may have "
                "pictures",
                param="messages",
            )
        spread = "".join(f"{piece}{one.text}" for piece, one in zip(pieces, layouts, strict=False))
        return spread + pieces[-1], layouts

    def _layout(self, picture: Picture) -> PictureLayout:
        """Return the layout of a picture.  Raises RequestError if the model cannot take it."""
        layout = self._form.layout(picture.width, picture.height, picture.detail)
        if layout.num_rows < FEWEST_TOKENS:
            raise RequestError(
                f"messages: a picture of {picture.width} x {picture.height} pixels has {layout.num_rows} tokens here, "
                f"and at least {FEWEST_TOKENS} are needed; send a larger one",
                param="messages",
            )
        return layout

    def place(
        self, token_ids: Int32, pictures: Sequence[Picture], layouts: Sequence[PictureLayout]
    ) -> tuple[Int32, RequestPart]:
        """Return the ids with those of pictures at their places, and the part of the request that has the pictures."""
        (places,) = np.nonzero(token_ids == self._token_id)
        if len(places) != sum(one.num_rows for one in layouts):
            raise RequestError(
                f"messages: a text has the token {self._form.token!r}, which stands for a picture; remove it",
                param="messages",
            )
        token_ids, placed, first = token_ids.copy(), [], 0
        for picture, layout in zip(pictures, layouts, strict=True):
            mine = places[first : first + layout.num_rows].astype(np.int32)
            first += layout.num_rows
            key = hashlib.sha256(f"{picture.digest} {self._form.settings} {layout.way}".encode()).hexdigest()
            token_ids[mine] = picture_ids(key, len(mine))
            placed.append(PlacedPicture(key, picture.data, mine.tobytes(), layout.grid, self._form.whole, layout.way))
        return token_ids, RequestPart("", msgspec.msgpack.encode(placed))


def picture_ids(key: str, count: int) -> Int32:
    """Return the ids of the first ``count`` tokens of a picture: 30 bits of its key and the token's number."""
    drawn = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * count), dtype="<u4")
    return (drawn % FIRST_ID + FIRST_ID).astype(np.int32)
