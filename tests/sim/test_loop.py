"""Virtual time: it stands still while anything can run, and then jumps to the next timer."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.extensions.chaos.sim.loop import SimDeadlock, SimLivelock, SimLoop

DAY_S = 86_400.0


def no_delay(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    return 0.0


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop(no_delay)
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def test_a_day_passes_at_once_and_exactly(loop: SimLoop) -> None:
    loop.run_until_complete(asyncio.sleep(DAY_S))
    assert loop.time() == DAY_S


def test_time_is_exactly_a_timers_when_it_fires(loop: SimLoop) -> None:
    wanted = [0.1 * step + 1e-7 for step in range(1, 50)]
    seen: list[float] = []
    for when in wanted:
        loop.call_at(when, lambda: seen.append(loop.time()))
    loop.run_until_complete(asyncio.sleep(10.0))
    assert seen == wanted


def test_what_is_due_at_the_same_time_runs_at_the_same_time(loop: SimLoop) -> None:
    async def nap(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return loop.time()

    async def main() -> list[float]:
        return await asyncio.gather(nap(1.0), nap(0.5), nap(1.0))

    assert loop.run_until_complete(main()) == [1.0, 0.5, 1.0]


def test_waiting_for_what_nobody_will_do_is_a_deadlock(loop: SimLoop) -> None:
    with pytest.raises(SimDeadlock, match="no timer is armed"):
        loop.run_until_complete(asyncio.Event().wait())


def test_running_on_without_time_is_a_livelock(loop: SimLoop) -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimLivelock, match="time does not advance"):
        loop.run_until_complete(spin())


def test_a_clock_jump_makes_everything_in_between_due(loop: SimLoop) -> None:
    fired: list[float] = []
    for seconds in (10.0, 20.0, 7200.0):
        loop.call_later(seconds, lambda: fired.append(loop.time()))
    loop.call_later(1.0, loop.jump, 3600.0)
    loop.run_until_complete(asyncio.sleep(5000.0))
    assert fired == [3601.0, 3601.0]


def test_a_thread_is_a_call_after_its_delay() -> None:
    loop = SimLoop(lambda function, arguments: 0.25)
    try:
        assert loop.run_until_complete(asyncio.to_thread(lambda: loop.time())) == 0.25
        with pytest.raises(ZeroDivisionError):
            loop.run_until_complete(asyncio.to_thread(lambda: 1 / 0))
        assert loop.time() == 0.5
    finally:
        loop.close()


def test_the_names_of_tasks_count_per_loop() -> None:
    names: list[str] = []
    for _ in range(2):
        loop = SimLoop(no_delay)
        names.append(loop.create_task(asyncio.sleep(0)).get_name())
        loop.run_until_complete(asyncio.sleep(1.0))
        loop.close()
    assert names == ["task-1", "task-1"]
