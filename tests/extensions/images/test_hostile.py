"""Hostile files: each is refused at once with what is wrong with it, and a stream of text beside it stays the same."""

import struct
import threading
import time

import pytest

from server.extensions.images.header import PictureError, read_header
from tests.extensions.images.hostile import Hostile, hostile
from tests.extensions.images.pictures import data_uri, picture, seeing
from tests.pace import far
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer

STREAM = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "a long story"}],
    "stream": True,
    "ignore_eos": True,
    "seed": 7,
}


def send(live: LiveServer, one: Hostile) -> Reply:
    parts = [{"type": one.field, one.field: {"url": data_uri(one.data, one.media_type)}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    return ask(live.port, "POST", "/v1/chat/completions", body)


def streamed(live: LiveServer, max_tokens: int) -> str:
    reply = ask(live.port, "POST", "/v1/chat/completions", {**STREAM, "max_tokens": max_tokens})
    events = [event for event in reply.events if event != "[DONE]"]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


@pytest.mark.parametrize(
    ("count", "seed"), [(57, 1), pytest.param(1000, 2, marks=pytest.mark.slow)], ids=["few", "a thousand"]
)
def test_hostile_files_are_refused_and_disturb_nothing(count: int, seed: int) -> None:
    num_tokens = 10 * count
    with seeing(FakeIngress(delay_s=0.001)) as live:
        beside: list[str] = []
        thread = threading.Thread(target=lambda: beside.append(streamed(live, num_tokens)))
        thread.start()
        slowest = 0.0
        for one in hostile(count, seed):
            began = time.monotonic()
            reply = send(live, one)
            slowest = max(slowest, time.monotonic() - began)
            assert reply.status in ((400,) if one.refused else (200, 400)), (one.kind, reply.status, reply.body[:300])
            if reply.status == 400:
                assert reply.error["code"] == "invalid_image", (one.kind, reply.error)
                assert reply.error["message"].startswith(f"messages[0].content[0].{one.field}.url: "), one.kind
        thread.join(far(60))
        assert beside == [streamed(live, num_tokens)]
    print(f"{count} files, the slowest took {slowest:.2f} s")
    assert slowest < far(1)


def test_scans_times_pixels_are_bounded() -> None:
    jpeg = bytearray(picture("JPEG", (64, 64), progressive=True))
    num_scans = jpeg.count(b"\xff\xda")
    at = jpeg.index(b"\xff\xc2") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 6300, 6300)
    assert read_header(bytes(jpeg)).width == 6300
    at = jpeg.rindex(b"\xff\xda")
    more = bytes(jpeg[:at] + jpeg[at:-2] * (18 - num_scans) + jpeg[-2:])
    with pytest.raises(PictureError, match="a JPEG of 17 scans over 6300 x 6300 pixels"):
        read_header(more)
