"""An encoder of pictures for one model, as a plugin provides it.

Legend: L layers that get rows, 1 and those of ``num_deep`` · N places of a picture in the prompt · D model dim
Owns: the protocols.  Does not know: files of pictures, prompts, when a picture is encoded.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec

from engine.text.pictures import PictureFormat

if TYPE_CHECKING:
    from torch import Tensor


log = logging.getLogger(__name__)


class Axes(NamedTuple):
    """The division of a head's rotated pairs among frame, line and column.

    sections: pairs of each.  interleaved: the axes take turns, as far as an axis has pairs left; else each has its
    pairs in a row."""

    sections: tuple[int, int, int]
    interleaved: bool


@runtime_checkable
class Encoder(PictureFormat, Protocol):
    """An encoder.  Everything but ``tower`` works without torch, in any thread.

    axes: of positions in pictures; None if a picture's tokens have positions like those of a text.
    num_deep: number of first layers behind which rows of their own are added at a picture's places."""

    axes: Axes | None
    num_deep: int

    def tower(self, device: str, dtype: str) -> "Tower":
        """Return the part that computes, with its weights.  dtype: the model's, 'float32', 'bfloat16', 'float16'.

        Raises WeightsError that names the file."""
        ...


class Tower(Protocol):
    """The part of an encoder that computes.  It is used on one thread at a time.  nbytes: of its weights."""

    nbytes: int

    def encode(self, data: bytes, way: str) -> "Tensor":
        """Return rows_LND of a picture, in the model's dtype, on the device; the same bits whatever came before.

        data: the file.  way: as in its layout.  Raises RequestError if it cannot be read."""
        ...


class ToEncode(msgspec.Struct, frozen=True, array_like=True):
    """A picture to encode.  data: the file.  way, num_rows: as in its layout."""

    data: bytes
    way: str
    num_rows: int = 0


@runtime_checkable
class BatchTower(Tower, Protocol):
    """A tower that can compute several pictures at once, with other bits than alone."""

    def encode_batch(self, pictures: Sequence[ToEncode]) -> "list[Tensor]":
        """Return rows_LND of each picture.  Whatever it raises, the pictures are encoded one by one then."""
        ...


def encode_each(tower: Tower, pictures: Sequence[ToEncode]) -> "list[Tensor | Exception]":
    """Return rows_LND of each picture, or what its encoder has raised; at once where the tower can."""
    if len(pictures) > 1 and isinstance(tower, BatchTower):
        try:
            return [*tower.encode_batch(pictures)]
        except Exception as error:  # of a library, by one of the pictures
            log.debug("%d pictures are encoded one by one: %s", len(pictures), error)
    found: list[Tensor | Exception] = []
    for one in pictures:
        try:
            found.append(tower.encode(one.data, one.way))
        except Exception as error:
            found.append(error)
    return found
