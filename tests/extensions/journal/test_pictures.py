"""Streams whose requests have pictures by address: they go on with the same ones alone, and keep none at their end."""

import asyncio
import gc
import os
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.settings.sections import ServerSection
from server.extensions.images.media import Media
from tests.extensions.images.pictures import picture, seeing
from tests.extensions.journal.test_streams import ask, check_numbers, crash, events_of, rejoin, send, storage
from tests.server.http_client import RawClient
from tests.server.live_server import LiveServer

CHAT = "/v1/chat/completions"
PARTS = [{"type": "image_url", "image_url": {"url": "http://pictures.test/a.png"}}, {"type": "text", "text": "What?"}]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 9}


class Host:
    """A host of one picture.  num_fetched: how often it was fetched.  answers: False to let clients wait."""

    def __init__(self) -> None:
        self.data = picture()
        self.num_fetched = 0
        self.answers = True

    async def fetch(self, *_: object) -> tuple[bytes, str]:
        self.num_fetched += 1
        if not self.answers:
            await asyncio.Event().wait()
        return bytes(bytearray(self.data)), "image/png"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    one = Host()
    monkeypatch.setattr(Media, "fetch", one.fetch)
    return one


def server(folder: Path, **changed: Any) -> LiveServer:
    return seeing(storage=storage(folder, **changed), server=ServerSection(api_key=("mine", "yours")))


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_stream_goes_on_with_the_pictures_it_began_with_alone(tmp_path: Path, host: Host, is_changed: bool) -> None:
    with server(tmp_path / "first") as live:
        events = events_of(ask(live, CHAT, BODY))
    folder = crash(tmp_path / "first", tmp_path / "second", 4)
    if is_changed:
        host.data = picture(size=(20, 8))
    with server(folder) as live:
        again = events_of(rejoin(live, 2))
        assert live.call(lambda: len(live.ingress.opened)) == (0 if is_changed else 1)
    if is_changed:
        assert "picture_changed" in again[-1]
    else:
        check_numbers(again, 2)
        assert len(again) == len(events) - 2


def test_a_server_starts_before_pictures_are_read_and_reads_none_of_ended_streams(tmp_path: Path, host: Host) -> None:
    with server(tmp_path / "first") as live:
        events = events_of(ask(live, CHAT, BODY))
    folder = crash(tmp_path / "first", tmp_path / "second", 4)
    host.answers = False
    with server(tmp_path / "first") as live:
        assert events_of(rejoin(live, None)) == events
    assert host.num_fetched == 1
    with server(folder) as live, RawClient(live.port) as client:
        send(client, "/v1/streams/stream/1:a")
        client.read_until(b"stream/1:a:2\n")
        assert live.wait_until(lambda: host.num_fetched == 2, 5)


def test_ended_streams_keep_no_pictures(tmp_path: Path, host: Host) -> None:
    file = BytesIO()
    Image.frombytes("RGB", (200, 200), os.urandom(120_000)).save(file, "PNG")
    host.data = file.getvalue()
    with server(tmp_path, rejoin_s=600) as live:

        def taken() -> int:
            live.ingress.opened.clear()
            live.ingress.asked.clear()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        ask(live, CHAT, BODY, name="first")
        tracemalloc.start()
        try:
            before = live.call(taken)
            for number in range(10):
                events_of(ask(live, CHAT, BODY, name=f"r{number}"))
            assert live.call(taken) - before < 5 * len(host.data)
        finally:
            tracemalloc.stop()
