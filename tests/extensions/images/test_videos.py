"""Videos in conversations: moving files and lists of frames, checked before the engine gets them."""

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from engine.settings.sections import ServerSection
from engine.text.film_files import FilmFile
from engine.types.prompt import Film, Picture
from server.extensions.images import header
from tests.extensions.images.pictures import data_uri, picture, seeing
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer


def moving(form: str = "GIF", count: int = 4, size: tuple[int, int] = (12, 8), milliseconds: int = 250) -> bytes:
    """Return a file with so many frames of one colour each."""
    first, *others = (Image.new("RGB", size, (40 * number % 256, 9, 200)) for number in range(count))
    file = BytesIO()
    first.save(file, form, save_all=True, append_images=others, duration=milliseconds)
    return file.getvalue()


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with seeing(server=ServerSection(max_body_bytes=4 << 20)) as server:
        yield server


def post(live: LiveServer, *parts: dict[str, Any]) -> Reply:
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": list(parts)}]}
    return ask(live.port, "POST", "/v1/chat/completions", body)


def film(live: LiveServer) -> Picture:
    """The film that the engine got last."""
    prompt: Any = live.call(lambda: live.ingress.asked[-1][0])
    (one,) = prompt[0].pictures
    assert isinstance(one, Picture)
    return one


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_a_moving_file(live: LiveServer, form: str) -> None:
    data = moving(form)
    for part in (
        {"type": "video_url", "video_url": {"url": data_uri(data, f"video/{form.lower()}")}},
        {"type": "video_url", "video_url": data_uri(data, f"image/{form.lower()}")},
        {"type": "video", "video": data_uri(data)},
    ):
        assert post(live, part).status == 200
        found = film(live)
        assert (found.film, found.width, found.height) == (Film(4, 4.0), 12, 8)
        assert FilmFile.read(found.data).files == (data,)


def test_frames_as_a_list_and_with_commas(live: LiveServer) -> None:
    frames = [picture("JPEG", (16, 12), quality=quality) for quality in (40, 60, 80)]
    commas = ",".join(base64.b64encode(one).decode() for one in frames)
    listed = [data_uri(one, "image/jpeg") for one in frames]
    for part, fps in (
        ({"type": "video", "video": listed, "fps": 2}, 2.0),
        ({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{commas}"}}, 0.0),
        ({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{commas}", "fps": 1.5}}, 1.5),
    ):
        assert post(live, part).status == 200
        found = film(live)
        assert found.film == Film(3, fps, are_chosen=True)
        assert FilmFile.read(found.data).files == tuple(frames)


def test_a_picture_and_a_film_of_one_file_are_two_things(live: LiveServer) -> None:
    uri = data_uri(moving())
    assert post(live, {"type": "image_url", "image_url": uri}).status == 200
    assert film(live).film is None
    assert post(live, {"type": "video_url", "video_url": uri}).status == 200
    assert film(live).film is not None


def test_what_is_no_video_is_refused(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [data_uri(picture("PNG", (16, height))) for height in (12, 13)]
    avif = b"\0\0\0\x18ftypavif" + bytes(60)
    for part, field, reason in (
        ({"type": "video_url", "video_url": data_uri(avif)}, "video_url", "a video is read as an MP4"),
        ({"type": "video_url", "video_url": data_uri(picture())}, "video_url", "a PNG of one frame"),
        ({"type": "video_url", "video_url": data_uri(picture("JPEG"))}, "video_url", "a JPEG, which does not move"),
        ({"type": "video_url", "video_url": data_uri(moving(count=900))}, "video_url", "900 frames; at most 768"),
        ({"type": "video_url", "video_url": data_uri(moving()[:-40] + b";")}, "video_url", "cannot be decoded|frame"),
        ({"type": "video_url"}, "video_url", "required as text"),
        ({"type": "video", "video": []}, "video", "an empty list"),
        ({"type": "video", "video": small[:1]}, "video", "a video of 1 frames of 16 x 12 pixels"),
        ({"type": "video", "video": small}, "video", "16 x 12 and 16 x 13 pixels"),
        ({"type": "video", "video": [small[0], "data:x"]}, "video[1]", "a data URI must begin with"),
        ({"type": "video", "video": [small[0], data_uri(b"no")]}, "video[1]", "not a picture of a known format"),
        ({"type": "video", "video": small[:1] * 769}, "video", "more than 768 frames"),
        ({"type": "video", "video": small[:1] * 2, "fps": "2"}, "video.fps", "a number of frames a second"),
        ({"type": "video", "video": small[:1] * 2, "fps": -1}, "video.fps", "a number of frames a second"),
        ({"type": "video", "video": small[:1] * 2, "fps": 1e-300}, "video.fps", "a number of frames a second"),
        ({"type": "video", "file_id": "file_1"}, "file_id", "this server keeps none"),
    ):
        reply = post(live, part)
        assert reply.status == 400, (part["type"], reason, reply.body[:200])
        assert reply.error["param"] == f"messages[0].content[0].{field}", (reason, reply.error)
        assert any(one in reply.error["message"] for one in reason.split("|")), (reason, reply.error)


def test_the_pixels_of_all_frames_are_bounded_before_they_are_decoded(live: LiveServer) -> None:
    bomb = moving("GIF", 40, (1600, 1200))
    assert len(bomb) < 1 << 20
    reply = post(live, {"type": "video_url", "video_url": data_uri(bomb)})
    assert reply.status == 400
    assert f"40 frames have 76800000 pixels; at most {header.MAX_FILM_PIXELS}" in reply.error["message"]
