"""Templates get the content of a turn with pictures in parts, and of other turns as they read them."""

import pytest

from engine.text.chat import ChatTemplate
from engine.text.pictures import PictureLayout, PictureText
from engine.types.prompt import ChatTurn, Picture

PICTURE = Picture(b"", "", 1, 1)
PARTS = (
    "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<i>{% else %}{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<i>' }}{% endfor %}"
    "{% endif %};{% endfor %}"
)


def turn(role: str, text: str, *places: int) -> ChatTurn:
    return ChatTurn(role, text, pictures=(PICTURE,) * len(places), places=places)


@pytest.mark.parametrize("source", [PARTS, EITHER])
def test_pictures_stand_at_their_places(source: str) -> None:
    template = ChatTemplate(source, origin="", variables={})
    turns = [turn("user", "abcd", 0, 2, 2, 4), turn("assistant", "ok"), turn("user", "", 0)]
    assert template.render(turns) == "user:<i>ab<i><i>cd<i>;assistant:ok;user:<i>;"


def test_turns_that_are_joined_keep_their_pictures() -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate(refuses + PARTS, origin="", variables={})
    assert template.render([turn("system", "be"), turn("user", "abcd", 1)]) == "user:be\n\na<i>bcd;"


class Lines:
    """A format that has a token for each line of a picture."""

    placeholder = token = "<i>"
    settings, whole = "", False

    def layout(self, width: int, height: int, detail: str) -> PictureLayout:
        return PictureLayout(f"{width}:" + self.token * height, height)


def test_a_picture_is_laid_out_by_its_size_and_its_file_is_not_read() -> None:
    text, layouts = PictureText(Lines(), 5).spread("a<i>b", [Picture(b"no picture", "", 7, 4)])
    assert text == "a7:<i><i><i><i>b"
    assert [one.num_rows for one in layouts] == [4]
