"""The pace of unattended work: which rows it leaves to live requests, and whose turn it is."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from engine.actors.snapshot import Gauges, Snapshot
from engine.settings.sections import LimitsSection
from engine.types.notices import Stats
from server.backend import Backend
from server.extensions.storage.pace import Pace, Turns
from tests.pace import far


class Rows:
    """An engine of 8 rows, as far as ``Pace`` looks at it."""

    def __init__(self) -> None:
        self.ready = True
        self.live = 0
        self.lines: set[LineClient] = set()
        self.stats: Stats | None = None

    @property
    def num_open(self) -> int:
        return self.live + sum(one.num_open for one in self.lines)

    async def look(self, **_: object) -> Snapshot:
        return Snapshot(number=0, now=0.0, gauges=Gauges(max_running=8))

    def pace(self, **limits: int) -> Pace:
        parts: Mapping[str, Any] = {"ingress": self, "monitor": self, "card": None}
        clients: Any = SimpleNamespace(limits=LimitsSection(**limits))
        return Pace(Backend(**parts), clients)

    def client(self) -> Any:
        return LineClient(self)


class LineClient:
    """A client with one choice open, from its making to its close."""

    num_open = 1

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        rows.lines.add(self)

    def close(self) -> None:
        self._rows.lines.discard(self)


async def stay(rows: Rows, least: int, most: int) -> None:
    """So many lines run soon, and no others after that."""
    async with asyncio.timeout(far(5)):
        while not least <= len(rows.lines) <= most:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.2)
    assert least <= len(rows.lines) <= most


async def test_lines_leave_rows_free_and_step_back_for_live_requests() -> None:
    rows, done = Rows(), asyncio.Event()
    pace = rows.pace()
    attempts: list[int] = []

    async def attempt(number: int) -> int:
        attempts.append(number)
        await done.wait()
        return number

    work = [asyncio.create_task(pace.run("", rows.client, lambda _, n=n: attempt(n))) for n in range(20)]  # type: ignore[misc]
    await stay(rows, 6, 6)  # a quarter of the rows stays free
    rows.live = 2
    await stay(rows, 6, 6)
    rows.live = 5
    await stay(rows, 3, 3)  # as many have stepped back as live requests need rows
    assert attempts == list(range(6))
    rows.live = 9
    await stay(rows, 0, 0)
    rows.live = 0
    done.set()
    assert sorted(await asyncio.gather(*work)) == list(range(20))
    assert attempts.count(0) == 2


async def test_a_line_steps_back_where_live_requests_wait_for_pages() -> None:
    rows, done = Rows(), asyncio.Event()
    pace = rows.pace()
    work = [asyncio.create_task(pace.run("", rows.client, lambda _: done.wait())) for _ in range(4)]
    await stay(rows, 4, 4)
    rows.live, rows.stats = 1, Stats(step_id=1, running=4, waiting=1, pages_free=0, pages_cached=0, pages_used=9)
    await stay(rows, 0, 3)
    rows.live = 0
    done.set()
    await asyncio.gather(*work)


async def test_a_limit_of_requests_is_not_used_up_by_lines() -> None:
    rows, done = Rows(), asyncio.Event()
    pace = rows.pace(max_requests=4)
    work = [asyncio.create_task(pace.run("", rows.client, lambda _: done.wait())) for _ in range(4)]
    await stay(rows, 2, 2)
    done.set()
    await asyncio.gather(*work)


async def test_turns_go_round_among_owners_and_pass_over_what_was_cancelled() -> None:
    turns, had = Turns(), []
    may_begin = asyncio.Event()

    async def work(owner: str, number: int) -> None:
        async with turns.of(owner):
            await may_begin.wait()
            had.append(f"{owner}{number}")

    wanted = [("a", number) for number in range(4)] + [("b", 0), ("b", 1), ("c", 0)]
    tasks = [asyncio.create_task(work(*one)) for one in wanted]
    await asyncio.sleep(0)
    tasks[1].cancel()
    may_begin.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert had == ["a0", "a2", "b0", "c0", "a3", "b1"]


async def test_a_turn_that_comes_to_cancelled_work_goes_on_to_the_next() -> None:
    turns, had = Turns(), []

    async def work(owner: str) -> None:
        async with turns.of(owner):
            had.append(owner)
            if owner == "a":
                asyncio.get_running_loop().call_soon(tasks[1].cancel)

    tasks = [asyncio.create_task(work(owner)) for owner in "abc"]
    async with asyncio.timeout(far(5)):
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.of("d"):
            had.append("d")
    assert had[0] == "a"
    assert had[-2:] == ["c", "d"]
