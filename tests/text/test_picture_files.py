"""Pictures of programs: the same one by its path, its bytes or as a PIL image is the same to a model."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from engine.text.picture_files import ORIENTATION, read_picture
from engine.text.turns import read_conversations, read_turn
from engine.types.errors import RequestError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def picture(mode: str = "RGB") -> Any:
    """Two colours side by side."""
    both = Image.new("RGB", (40, 20), (200, 30, 30))
    both.paste((30, 30, 200), (20, 0, 40, 20))
    return both.convert(mode)


def said(image: object, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image, **fields}, {"type": "text", "text": "what?"}]}


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F"])
def test_an_image_of_any_mode_is_what_its_colours_are(mode: str) -> None:
    image = picture("L").convert(mode) if mode in "IF" else picture(mode)
    (found,) = read_turn(said(image)).pictures
    assert (found.width, found.height) == (40, 20)
    assert read_picture(found.data).tobytes() == image.convert("RGB").tobytes()


def test_a_turned_picture_is_the_same_by_its_path_its_bytes_and_as_an_image(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    path = tmp_path / "turned.jpg"
    picture().save(path, exif=turned)
    every = (str(path), path, path.read_bytes(), Image.open(path))
    found = [read_turn(said(one)).pictures[0] for one in every]
    assert [(one.width, one.height) for one in found] == [(20, 40)] * 4
    assert len({read_picture(one.data).tobytes() for one in found}) == 1


def test_a_picture_that_conversations_share_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture().save(path)
    image = picture()
    asked = [[said(one)] for one in (image, path, image, path)] + [[said(image, detail="low")]]
    first, second, *again, low = [turn.pictures[0] for (turn,) in read_conversations(asked)]
    assert again[0] is first
    assert again[1] is second
    assert (low.digest, low.detail) == (first.digest, "low")


def cut() -> Any:
    file = BytesIO()
    picture().resize((400, 300)).rotate(30).save(file, "PNG")
    return Image.open(BytesIO(file.getvalue()[:400]))


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("/nowhere.png", "No such file"),
        ("a\0b", "null byte"),
        (5, "must be a path, bytes or a PIL image, not 5"),
        (None, "must be a path, bytes or a PIL image"),
        (b"text", "cannot be read"),
        (cut(), "truncated"),
    ],
)
def test_what_is_no_picture_is_a_clear_error(image: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_turn(said(image))
