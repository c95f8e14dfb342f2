"""Large bodies are understood one after the other, with as much time for all else between two of them."""

import asyncio
import threading
import time

import msgspec

from engine.settings.sections import ServerSection
from server.http.body import LARGE_BODY_BYTES, BodyReader

TOOK_S = 0.05


class Body(msgspec.Struct):
    text: str


class Slowly:
    """Understands a body in ``TOOK_S``.  spans: when it began and ended with each of the large ones."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def __call__(self, body: Body) -> str:
        if threading.current_thread() is not threading.main_thread():
            began = time.monotonic()
            time.sleep(TOOK_S)
            self.spans.append((began, time.monotonic()))
        return body.text[:1]


def body(length: int) -> bytes:
    return msgspec.json.encode({"text": "x" * length})


async def test_large_bodies_take_turns_and_small_ones_do_not_wait() -> None:
    slowly = Slowly()
    reader = BodyReader(Body, slowly, ServerSection())
    large = [asyncio.create_task(reader.understand(body(LARGE_BODY_BYTES))) for _ in range(4)]
    await asyncio.sleep(0)
    began = time.monotonic()
    assert await reader.understand(body(1)) == "x"
    assert time.monotonic() - began < TOOK_S
    assert await asyncio.gather(*large) == ["x"] * 4
    for (began, ended), (later, _) in zip(slowly.spans, slowly.spans[1:], strict=False):
        assert later - ended > 0.8 * (ended - began)


async def test_a_large_body_whose_client_has_left_gives_its_turn_back() -> None:
    reader = BodyReader(Body, Slowly(), ServerSection())
    first, second = (asyncio.create_task(reader.understand(body(LARGE_BODY_BYTES))) for _ in range(2))
    await asyncio.sleep(TOOK_S / 5)
    first.cancel()
    assert await asyncio.wait_for(second, 5) == "x"
