"""The executor actor: steps run in order on its own thread; whatever goes wrong there reaches the supervisor."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.actors.executor import Executor
from engine.errors import WeightsError
from engine.messages import ExecutorReady, Step, StepDone, Stop


@dataclass
class FakePending:
    step_id: int
    is_ready: bool

    def ready(self) -> bool:
        return self.is_ready

    def collect(self) -> StepDone:
        return StepDone(rank=0, step_id=self.step_id, token_ids=b"")


@dataclass
class FakeRunner:
    """Notes the threads and the order of launches; ``slow`` pretends that a device works on."""

    slow: bool = False
    num_pages: int = 7
    launched: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    has_left: bool = False

    def launch(self, step: Step) -> FakePending:
        if step.step_id == 99:
            raise MemoryError("no more memory")
        self.launched.append(step.step_id)
        self.threads.add(threading.current_thread().name)
        return FakePending(step.step_id, is_ready=not self.slow)

    def leave(self) -> None:
        self.has_left = True


class Collected:
    """The scheduler's end of the link; ``wait_for`` returns once so many messages have come."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._arrived = asyncio.Condition()

    def put(self, message: Any) -> None:
        self.messages.append(message)

    async def wait_for(self, count: int) -> list[Any]:
        async with asyncio.timeout(5):
            while len(self.messages) < count:
                await asyncio.sleep(0.001)
        return self.messages


def with_executor(load: Callable[[], Any], scenario: Callable[[Executor, Collected, asyncio.Task[None]], Any]) -> None:
    async def run() -> None:
        executor, collected = Executor(rank=0, capacity=100, load=load), Collected()
        executor.connect(collected)
        task = asyncio.create_task(executor.run())
        await scenario(executor, collected, task)

    before = set(threading.enumerate())  # an engine of another test may have left one that hangs on purpose
    asyncio.run(run())
    for thread in threading.enumerate():
        if thread.name == "executor0" and thread not in before:
            thread.join(2)  # a thread that has reported its failure is on its way out
            assert not thread.is_alive(), "the thread outlived the actor"


@pytest.mark.parametrize("slow", [False, True])
def test_steps_run_in_order_on_one_thread_and_every_result_comes_back(slow: bool) -> None:
    runner = FakeRunner(slow=slow)

    async def scenario(executor: Executor, collected: Collected, task: asyncio.Task[None]) -> None:
        assert await collected.wait_for(1) == [ExecutorReady(rank=0, num_pages=7)]
        for step_id in range(20):
            executor.inbox.put(Step(step_id))
            if step_id % 3 == 0:
                await asyncio.sleep(0.002)
        results = (await collected.wait_for(21))[1:]
        assert [result.step_id for result in results] == runner.launched == list(range(20))
        assert runner.threads == {"executor0"}
        executor.inbox.put(Stop())
        await task

    with_executor(lambda: runner, scenario)


@pytest.mark.parametrize("when", ["loading", "running"])
def test_a_failure_on_the_thread_is_the_actors_failure(when: str) -> None:
    def load() -> FakeRunner:
        if when == "loading":
            raise WeightsError("model.safetensors: cut short")
        return FakeRunner()

    async def scenario(executor: Executor, collected: Collected, task: asyncio.Task[None]) -> None:
        if when == "running":
            await collected.wait_for(1)
            executor.inbox.put(Step(99))
        with pytest.raises(WeightsError if when == "loading" else MemoryError):
            await asyncio.wait_for(task, 5)

    with_executor(load, scenario)


def test_an_actor_that_is_cancelled_ends_its_thread() -> None:
    async def scenario(_: Executor, collected: Collected, task: asyncio.Task[None]) -> None:
        await collected.wait_for(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_executor(FakeRunner, scenario)
