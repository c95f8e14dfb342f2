"""Pictures are refused where a model has no room for them in its prompts."""

import pytest

from engine.text.pictures import PictureLayout, PictureText
from engine.types.errors import RequestError
from engine.types.prompt import Picture


class Strips:
    """A format whose layouts have as many places as a picture has columns of ten pixels."""

    placeholder, token, settings, whole = "<p>", "<p>", "", False

    def layout(self, width: int, height: int) -> PictureLayout:
        return PictureLayout("<p>" * (width // 10), width // 10)

    def size(self, data: bytes) -> tuple[int, int]:
        return data[0], data[1]


def test_a_picture_without_places_is_refused_with_its_size() -> None:
    pictures = PictureText(Strips(), 7)
    text, layouts = pictures.spread("a<p>b", [Picture(bytes([41, 9]), "", 41, 9)])
    assert (text, layouts[0].num_rows) == ("a<p><p><p><p>b", 4)
    with pytest.raises(RequestError, match="a picture of 9 x 41 pixels has no token here"):
        pictures.spread("a<p>b", [Picture(bytes([9, 41]), "", 9, 41)])
