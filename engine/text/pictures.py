"""Pictures in prompts: the text that stands for each, and the token ids at its places.

Owns: the ids of a picture's tokens, their places, the part of a request that has the pictures.
Does not know: families, files, how a picture is computed.

A picture's tokens have ids past every vocabulary, which follow from its content, the settings of its encoder and the
token's number.  So whatever compares prompts by their ids, the cache first, shares a picture's tokens where the picture
is the same, and only there.  A rank replaces the ids by the model's own token before it computes.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engine.types.errors import RequestError
from engine.types.prompt import Film, Picture, RequestPart

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
    way: a name for its encoder, of the way to encode it; '' for the usual one.
    interval: of the positions of two frames."""

    text: str
    num_rows: int
    grid: tuple[int, int, int] = (0, 0, 0)
    way: str = ""
    interval: float = 1.0


class PictureFormat(Protocol):
    """The format in which a model takes pictures.

    placeholder: text that chat templates write for a picture.  token: text of the token at its places.
    settings: digest of all but the picture that its rows depend on.
    whole: layers in which each token of a picture attends to all of it: '' for none, 'all', or 'windows' for those that
    have a sliding window."""

    placeholder: str
    token: str
    settings: str
    whole: Literal["", "all", "windows"]

    def layout(self, width: int, height: int, detail: str) -> PictureLayout:
        """Return the layout of a picture of so many pixels, as it is shown.  detail: 'auto', 'low' or 'high'.

        Raises RequestError if the model cannot take it."""
        ...


@runtime_checkable
class FilmFormat(Protocol):
    """The part of a format that takes films.  film_placeholder: text that chat templates write for one."""

    film_placeholder: str

    def film_layout(self, width: int, height: int, film: Film) -> PictureLayout:
        """Return the layout of a film with frames of so many pixels; those of a grid may have text between them.

        Raises RequestError if the model cannot take it."""
        ...


class PlacedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A picture in a prompt.

    key: digest of its content and of its encoder's settings and way.  data: the file.  places: int32[n], positions in
    the prompt.  grid, way, interval: as in ``PictureLayout``.
    whole: whether a step must compute all of it."""

    key: str
    data: bytes
    places: bytes
    grid: tuple[int, int, int]
    whole: bool
    way: str = ""
    interval: float = 1.0

    @property
    def places_n(self) -> Int32:
        """The positions as an array, ascending."""
        return np.frombuffer(self.places, dtype=np.int32)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The first and last positions, plus 1, of places in a row: a film may have text between its frames."""
        return runs_of(self.places_n)

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
        layouts = [self._layout(one) for one in pictures]
        marks = [self._form.placeholder if one.film is None else self._film_mark for one in pictures]
        pieces = re.split(f"({'|'.join(map(re.escape, dict.fromkeys(marks)))})", text)
        found = pieces[1::2]
        if found != marks:
            mark = next((one for one in marks if found.count(one) != marks.count(one)), marks[0])
            kind = "pictures" if mark == self._form.placeholder else "videos"
            raise RequestError(
                f"messages: the model's chat template writes {mark!r} {found.count(mark)} times for "
                f"{marks.count(mark)} {kind}; a text must not have it, and each must be in a turn that may have {kind}",
                param="messages",
            )
        spread = "".join(f"{piece}{one.text}" for piece, one in zip(pieces[::2], layouts, strict=False))
        return spread + pieces[-1], layouts

    @property
    def _film_mark(self) -> str:
        """The text that chat templates write for a film.  Raises RequestError for a model that takes none."""
        if not isinstance(self._form, FilmFormat) or not self._form.film_placeholder:
            raise RequestError("this model takes no videos; send pictures", code="no_videos", param="messages")
        return self._form.film_placeholder

    def _layout(self, picture: Picture) -> PictureLayout:
        """Return the layout of a picture.  Raises RequestError if the model cannot take it."""
        if picture.film is not None and self._film_mark:
            assert isinstance(self._form, FilmFormat)
            layout = self._form.film_layout(picture.width, picture.height, picture.film)
        else:
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
            placed.append(
                PlacedPicture(
                    key, picture.data, mine.tobytes(), layout.grid, bool(self._form.whole), layout.way, layout.interval
                )
            )
        return token_ids, RequestPart("", msgspec.msgpack.encode(placed))


def runs_of(places_n: Int32) -> list[tuple[int, int]]:
    """Return the runs of ascending positions that follow each other: the first one, and the one after the last."""
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places_n, np.flatnonzero(np.diff(places_n) != 1) + 1)]


def picture_ids(key: str, count: int) -> Int32:
    """Return the ids of the first ``count`` tokens of a picture: 30 bits of its key and the token's number."""
    drawn = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * count), dtype="<u4")
    return (drawn % FIRST_ID + FIRST_ID).astype(np.int32)
