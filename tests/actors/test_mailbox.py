"""Mailboxes are bounded FIFOs, and an actor handles all that has arrived before it acts."""

import asyncio

import pytest

from engine.actors.actor import Actor, Deliveries, Mailbox
from engine.messages import Stop
from tests.pace import turns


async def test_everything_that_arrived_is_delivered_at_once_and_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox("test", 10)
    mailbox.put(0)
    delivered: list[list[int]] = []
    mailbox.open(delivered.append)
    for number in range(1, 4):
        mailbox.put(number)
    await asyncio.sleep(0)
    mailbox.put(4)
    await asyncio.sleep(0)
    mailbox.close()
    mailbox.put(5)
    await asyncio.sleep(0)
    assert delivered == [[0, 1, 2, 3], [4]]


async def test_what_is_put_during_a_delivery_is_delivered_in_the_same_turn_of_the_loop_behind_what_was_due() -> None:
    log: list[tuple[str, list[int]]] = []
    one, other, last = (Mailbox[int](name, 10) for name in ("one", "other", "last"))

    def open_logged(mailbox: Mailbox[int], then: Mailbox[int] | None = None) -> None:
        def deliver(numbers: list[int]) -> None:
            log.append((mailbox.name, numbers))
            if then is not None and numbers[0] < 3:
                then.put(numbers[0] + 1)
                then.put(9)

        mailbox.deliveries = deliveries
        mailbox.open(deliver)

    deliveries = Deliveries()
    open_logged(one, then=other)
    open_logged(other, then=one)
    open_logged(last)
    for _ in range(2):  # the second time nothing is left of the first
        one.put(1)
        last.put(0)
        asyncio.get_running_loop().call_soon(log.append, ("a turn", []))
        await asyncio.sleep(0)
    turn = [("one", [1]), ("last", [0]), ("other", [2, 9]), ("one", [3, 9]), ("a turn", [])]
    assert log == 2 * turn


def test_an_overflow_is_logged_once_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    mailbox: Mailbox[Stop] = Mailbox("scheduler", 2)
    for _ in range(5):
        mailbox.put(Stop())
    assert [record.message for record in caplog.records] == ["scheduler: more than 2 messages queued, with Stop"]
    assert len(mailbox) == 5


class Panic(BaseException):
    """As libraries in Rust raise them: not an Exception."""


class Echo(Actor[int]):
    """Notes what it handled, when it flushed, and that it closed."""

    def __init__(self) -> None:
        super().__init__("echo", 100)
        self.log: list[object] = []

    def handle(self, message: int) -> None:
        if message < 0:
            raise ValueError("negative") if message == -1 else Panic("negative")
        self.log.append(message)
        if message == 7:
            self.spawn(self._later())

    async def _later(self) -> int:
        await asyncio.sleep(0)
        return 70

    def flush(self) -> None:
        self.log.append("flush")

    def close(self) -> None:
        self.log.append("close")


async def test_all_that_arrived_is_handled_before_one_flush() -> None:
    actor = Echo()
    for message in (1, 2, 3):
        actor.inbox.put(message)
    task = asyncio.create_task(actor.run())
    await turns()
    actor.inbox.put(7)
    await turns()
    actor.inbox.put(Stop())
    await task
    assert actor.log == [1, 2, 3, "flush", 7, "flush", 70, "flush", "flush", "close"]


async def test_a_crash_closes_the_actor_once_and_reaches_the_supervisor() -> None:
    actor = Echo()
    actor.inbox.put(-1)
    with pytest.raises(ExceptionGroup) as crash:
        await actor.run()
    assert crash.group_contains(ValueError, match="negative")
    assert actor.log == ["close"]


async def test_a_crash_that_is_no_exception_reaches_the_supervisor_too_and_others_still_get_their_messages() -> None:
    panics, other = Echo(), Echo()
    other.inbox.deliveries = panics.inbox.deliveries
    tasks = [asyncio.create_task(actor.run()) for actor in (panics, other)]
    await asyncio.sleep(0)
    panics.inbox.put(-2)
    other.inbox.put(1)
    await turns()
    other.inbox.put(2)
    other.inbox.put(Stop())
    with pytest.raises(ExceptionGroup) as crash:
        await asyncio.wait_for(tasks[0], 5)
    assert crash.group_contains(RuntimeError, match="Panic")
    await asyncio.wait_for(tasks[1], 5)
    assert other.log == [1, "flush", 2, "flush", "close"]
