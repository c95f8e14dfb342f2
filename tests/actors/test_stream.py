"""A stream says the same however it is read: piece by piece, late, all at once, or within the push."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from engine.actors.stream import Stream
from engine.messages import Delta, Finish
from engine.types.errors import RequestError

Sink = Callable[[Delta], bool]


def delta(text: str, finish: Finish = Finish.RUNNING) -> Delta:
    return Delta(request_id=1, text=text, token_ids=b"\x01\0\0\0", finish=finish)


@pytest.fixture
async def stream() -> Stream:
    return Stream(1, lambda request_id: None)


def taking(seen: list[Delta], limit: int = 1 << 30) -> Sink:
    """Takes so many at a time."""

    def sink(one: Delta) -> bool:
        seen.append(one)
        return len(seen) % limit != 0

    return sink


async def test_a_relay_hands_over_in_the_moment_of_the_push(stream: Stream) -> None:
    seen: list[Delta] = []
    relaying = asyncio.create_task(stream.relay(taking(seen)))
    await asyncio.sleep(0)
    for number, text in enumerate("abc"):
        stream.push(delta(text))
        assert len(seen) == number + 1
    stream.push(delta("d", Finish.STOP))
    assert await relaying
    assert "".join(one.text for one in seen) == "abcd"
    with pytest.raises(StopAsyncIteration):
        await stream.next()


async def test_what_was_there_before_comes_first_and_merged(stream: Stream) -> None:
    stream.push(delta("a"))
    stream.push(delta("b"))
    seen: list[Delta] = []
    relaying = asyncio.create_task(stream.relay(taking(seen)))
    await asyncio.sleep(0)
    stream.push(delta("c", Finish.LENGTH))
    assert await relaying
    assert [(one.text, len(one.token_ids)) for one in seen] == [("ab", 8), ("c", 4)]


async def test_a_request_that_has_ended_before_is_relayed_too(stream: Stream) -> None:
    stream.push(delta("a", Finish.STOP))
    seen: list[Delta] = []
    assert await stream.relay(taking(seen))
    assert [one.text for one in seen] == ["a"]


async def test_a_sink_that_has_enough_is_left_alone_until_it_comes_back(stream: Stream) -> None:
    seen: list[Delta] = []
    relaying = asyncio.create_task(stream.relay(taking(seen, 2)))
    await asyncio.sleep(0)
    for text in "abcde":
        stream.push(delta(text))
    assert not await relaying
    assert [one.text for one in seen] == ["a", "b"]
    stream.push(delta("f", Finish.STOP))
    assert await stream.relay(taking(seen))
    assert [one.text for one in seen] == ["a", "b", "cdef"]


async def test_the_last_delta_ends_it_even_if_the_sink_has_enough(stream: Stream) -> None:
    relaying = asyncio.create_task(stream.relay(taking([], 1)))
    await asyncio.sleep(0)
    stream.push(delta("a", Finish.STOP))
    assert await relaying


async def test_a_failure_comes_after_what_was_produced(stream: Stream) -> None:
    seen: list[Delta] = []
    relaying = asyncio.create_task(stream.relay(taking(seen, 1)))
    await asyncio.sleep(0)
    stream.push(delta("a"))
    stream.push(delta("b"))
    stream.fail(RequestError("no more"))
    assert not await relaying
    with pytest.raises(RequestError, match="no more"):
        while True:
            await stream.relay(taking(seen))
    assert [one.text for one in seen] == ["a", "b"]


async def test_a_failure_while_all_is_quiet_is_raised(stream: Stream) -> None:
    relaying = asyncio.create_task(stream.relay(taking([])))
    await asyncio.sleep(0)
    stream.fail(RequestError("no more"))
    assert not await relaying
    with pytest.raises(RequestError, match="no more"):
        await stream.relay(taking([]))


async def test_what_a_sink_raises_is_its_readers_and_not_the_engines(stream: Stream) -> None:
    def broken(one: Delta) -> bool:
        raise ConnectionResetError("gone")

    relaying = asyncio.create_task(stream.relay(broken))
    await asyncio.sleep(0)
    stream.push(delta("a"))
    stream.push(delta("b"))
    with pytest.raises(ConnectionResetError, match="gone"):
        await relaying


async def test_a_reader_that_is_cancelled_is_told_nothing_more(stream: Stream) -> None:
    seen: list[Delta] = []
    relaying = asyncio.create_task(stream.relay(taking(seen)))
    await asyncio.sleep(0)
    relaying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await relaying
    stream.push(delta("a", Finish.STOP))
    assert seen == []
    assert (await stream.next()).text == "a"


async def test_what_the_client_has_already_is_not_merged_with_what_is_new(stream: Stream) -> None:
    stream.push(msgspec.structs.replace(delta("old"), resumed=True))
    for text in ("a", "b"):
        stream.push(delta(text))
    first = await stream.next()
    assert (first.text, first.resumed) == ("old", True)
    rest = await stream.next()
    assert (rest.text, rest.resumed) == ("ab", False)
