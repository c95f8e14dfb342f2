"""Pictures are refused where a model has no room for them in its prompts."""

import pytest

from engine.text.pictures import PictureLayout, PictureText
from engine.types.errors import RequestError
from engine.types.prompt import Picture


class Strips:
    """A format whose layouts have as many places as a picture has columns of ten pixels."""

    placeholder, token, settings, whole = "<p>", "<p>", "", False

    def layout(self, width: int, height: int, detail: str) -> PictureLayout:
        return PictureLayout("<p>" * (width // 10), width // 10)

    def size(self, data: bytes) -> tuple[int, int]:
        return data[0], data[1]


@pytest.mark.parametrize("width", [9, 39])
def test_a_picture_with_too_few_tokens_is_refused_with_its_size(width: int) -> None:
    pictures = PictureText(Strips(), 7)
    text, layouts = pictures.spread("a<p>b", [Picture(bytes([41, 9]), "", 41, 9)])
    assert (text, layouts[0].num_rows) == ("a<p><p><p><p>b", 4)
    with pytest.raises(RequestError, match=f"{width} x 41 pixels has {width // 10} tokens here, and at least 4"):
        pictures.spread("a<p>b", [Picture(bytes([width, 41]), "", width, 41)])
