"""MP4 files in conversations: checked and decoded in a process, within limits, before the engine gets them."""

import random
import struct
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from engine.settings.sections import ServerSection
from engine.types.prompt import Film
from server.extensions.images import decoding, header
from server.extensions.images.decoding import FILM, PICTURE, judged
from server.extensions.images.header import PictureError, check_mp4, read_mp4
from tests.extensions.images.pictures import data_uri, picture, seeing
from tests.extensions.images.test_videos import film, moving, post
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer
from tests.text.films import turned, written


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with seeing(server=ServerSection(max_body_bytes=4 << 20)) as server:
        yield server


def sent(live: LiveServer, data: bytes, media_type: str = "video/mp4") -> tuple[int, str]:
    """Return the status, and the message of the error."""
    reply = post(live, {"type": "video_url", "video_url": {"url": data_uri(data, media_type)}})
    return reply.status, "" if reply.status == 200 else reply.error["message"]


def test_an_mp4_is_a_film(live: LiveServer) -> None:
    pytest.importorskip("av")
    data = written()
    assert sent(live, data) == (200, "")
    found = film(live)
    assert (found.film, found.width, found.height) == (Film(6, 5.0), 32, 24)
    assert sent(live, turned(data)) == (200, "")
    assert (film(live).width, film(live).height) == (24, 32)


def test_without_its_package_the_answer_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install 'callboard[video]'" in judged(b"\0\0\0\x10ftypisom" + bytes(4), FILM).problem


def test_as_a_picture_it_is_refused() -> None:
    assert "not a picture of a known format" in judged(b"\0\0\0\x10ftypisom" + bytes(4), PICTURE).problem


def resized(data: bytes, width: int, height: int) -> bytes:
    """Return a file whose header has another size, in both places that have it."""
    data = data.replace(struct.pack(">HH", 32, 24), struct.pack(">HH", width, height))
    return data.replace(struct.pack(">II", 32 << 16, 24 << 16), struct.pack(">II", width << 16, height << 16))


def hostile(rng: random.Random) -> Iterator[tuple[bytes, bool]]:
    """Yield files, and whether they must be refused: what is damaged by chance may still be a video."""
    whole = written()
    yield whole[: rng.randrange(8, len(whole))], True
    yield whole + rng.randbytes(rng.randrange(1, 40)), True
    yield whole + b"PK\5\6" + bytes(18), True
    yield whole[:8] + rng.randbytes(rng.randrange(400)), True
    yield whole[:32] + struct.pack(">I4sQ", 1, b"free", 1 << 62) + whole[32:], True
    yield whole[:32] + struct.pack(">I4s", 3, b"free") + whole[32:], True
    yield whole[:32] + struct.pack(">I4s", 8, b"free") * 5000 + whole[32:], True
    yield written(codec="mjpeg"), True
    yield written(1), True
    yield resized(whole, rng.randrange(9000, 16000), rng.randrange(9000, 16000)), False  # h264 has a size of its own
    damaged = bytearray(whole)
    for _ in range(rng.randrange(1, 200)):
        damaged[rng.randrange(4, len(whole))] = rng.randrange(256)
    yield bytes(damaged), False


def test_hostile_files_are_refused_and_the_server_goes_on(live: LiveServer) -> None:
    pytest.importorskip("av")
    slowest = 0.0
    for seed in range(4):
        for data, must_fail in hostile(random.Random(seed)):
            start = time.process_time()
            verdict = judged(data, FILM)
            slowest = max(slowest, time.process_time() - start)
            assert verdict.problem or not must_fail, (seed, data[:60])
    assert slowest < 1.0
    for data, must_fail in hostile(random.Random(9)):
        status, message = sent(live, data)
        assert status == 400 or (not must_fail and status == 200), (status, data[:60])
        assert "Traceback" not in message
    assert sent(live, written())[0] == 200


def test_sizes_are_refused_before_a_frame_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")

    def decoded(self: object) -> Iterator[object]:
        raise AssertionError("it was decoded")

    data = written(12, 64, 48)
    monkeypatch.setattr("engine.text.mp4_files.Mp4.frames", decoded)
    for name, limit, reason in (
        ("MAX_MP4_FRAMES", 11, "more than 11 frames"),
        ("MAX_MP4_S", 1, "at most 1 are allowed"),
        ("MAX_MP4_PIXELS", 12 * 64 * 48 - 1, "12 frames have 36864 pixels"),
        ("MAX_PIXELS", 64 * 48 - 1, "64 x 48 pixels"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(header, name, limit)
            assert reason in judged(data, FILM).problem
    assert "AssertionError" in judged(data, FILM).problem  # within the limits it is


def test_frames_that_the_header_leaves_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    data = written(12, 64, 48, movflags="frag_keyframe+empty_moov")
    assert judged(data, FILM).num_frames == 12
    monkeypatch.setattr(header, "MAX_MP4_FRAMES", 11)
    assert "more than 11 frames" in judged(data, FILM).problem


def test_a_rate_whose_times_are_no_numbers_is_refused() -> None:
    pytest.importorskip("av")
    data = bytearray(written())
    at = data.index(b"stts") + 16  # the time of each frame
    data[at : at + 4] = (0x7FFFFFFF).to_bytes(4, "big")
    assert "an MP4 of 5e-06 frames a second" in judged(bytes(data), FILM).problem


def test_a_requests_mp4s_have_so_many_pixels_together(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    monkeypatch.setattr("server.extensions.images.sight.MAX_MP4_PIXELS", 2 * 6 * 32 * 24 - 1)
    part = {"type": "video_url", "video_url": data_uri(written(), "video/mp4")}
    assert post(live, part).status == 200
    assert "the request's MP4s have 9216 pixels" in post(live, part, part).error["message"]


def test_boxes_and_limits() -> None:
    read_mp4(b"\0\0\0\x08ftyp" + b"\0\0\0\0mdatrest")
    for data in (b"\0\0\0\x09ftyp", b"\0\0\0\x08ft\xffp", b"\0\0\0\x07ftyp", bytes(9)):
        with pytest.raises(PictureError):
            read_mp4(data)
    with pytest.raises(PictureError, match="each side must have"):
        check_mp4(3, 100, 2, 0.0)
    assert decoding.MP4_TYPE == "video/mp4"
    assert not picture().startswith(b"ftyp")


def test_a_video_in_other_apis(live: LiveServer) -> None:
    uri = data_uri(written() if find_spec("av") else moving(), "video/mp4")
    part = {"type": "input_video", "video_url": uri}
    body = {"model": MODEL, "max_output_tokens": 2, "input": [{"role": "user", "content": [part]}]}
    assert ask(live.port, "POST", "/v1/responses", body).status == 200
    assert film(live).film is not None
    for path, content, reason in (
        ("/v1/messages", [{"type": "video", "source": {"type": "base64", "data": "AAAA"}}], "'video' is not served"),
        ("/api/chat", uri, "not valid base64"),
        ("/api/chat", data_uri(b"\0\0\0\x18ftypisom" + bytes(64), "video/mp4").partition(",")[2], "picture"),
    ):
        message = {"role": "user", "content": content}
        if path == "/api/chat":
            message = {"role": "user", "content": "See", "images": [content]}
        reply = ask(live.port, "POST", path, {"model": MODEL, "max_tokens": 2, "messages": [message]})
        assert reply.status == 400, reply.body[:200]
        assert reason in str(reply.error), reply.error
