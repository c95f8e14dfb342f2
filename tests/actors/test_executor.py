"""The executor actor: steps run in order on its own thread; whatever goes wrong there reaches the supervisor."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.actors.executor import Executor
from engine.actors.runner import Answer, Runner
from engine.messages import FeatureAnswer, FeatureRequest, Step, StepDone, Stop
from engine.types.errors import WeightsError
from engine.workers.messages import WorkerReady
from tests.pace import far


@dataclass
class FakePending:
    step_id: int
    is_ready: bool

    def ready(self) -> bool:
        return self.is_ready

    def collect(self) -> StepDone:
        return StepDone(rank=0, step_id=self.step_id, token_ids=b"")


@dataclass
class FakeRunner(Runner):
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
        async with asyncio.timeout(far(60)):
            while len(self.messages) < count:
                await asyncio.sleep(0.001)
        return self.messages


@asynccontextmanager
async def with_executor(
    load: Callable[[], Any], scheduler: "TwoInFlight | None" = None
) -> AsyncIterator[tuple[Executor, Collected, asyncio.Task[None]]]:
    """An executor that runs, what it sends, and its task, which the test ends."""
    before = set(threading.enumerate())  # an engine of another test may have left one that hangs on purpose
    executor, collected = Executor(rank=0, capacity=100, load=load), scheduler or Collected()
    if scheduler is not None:
        scheduler.executor = executor
    executor.connect(ready=lambda num_pages: collected.put(WorkerReady(num_pages=num_pages)), done=collected.put)
    task = asyncio.create_task(executor.run())
    yield executor, collected, task
    assert task.done(), "the test did not end its executor"
    for thread in threading.enumerate():
        if thread.name.startswith("executor0") and thread not in before:
            thread.join(far(2))  # a thread that has reported its failure is on its way out
            assert not thread.is_alive(), "the thread outlived the actor"


@pytest.mark.parametrize("slow", [False, True])
async def test_steps_run_in_order_on_one_thread_and_every_result_comes_back(slow: bool) -> None:
    runner = FakeRunner(slow=slow)

    async with with_executor(lambda: runner) as (executor, collected, task):
        assert await collected.wait_for(1) == [WorkerReady(num_pages=7)]
        for step_id in range(20):
            executor.inbox.put(Step(step_id=step_id))
            if step_id % 3 == 0:
                await asyncio.sleep(0.002)
        results = (await collected.wait_for(21))[1:]
        assert [result.step_id for result in results] == runner.launched == list(range(20))
        assert runner.threads == {"executor0"}
        executor.inbox.put(Stop())
        await task


class Answering(FakeRunner):
    """A device that answers a message on a thread of its own."""

    def receive(self, message: FeatureRequest, answer: Answer) -> None:
        done = FeatureAnswer(rank=0, feature=message.feature, number=message.number, body=b"3")
        threading.Thread(target=answer, args=(done,)).start()


async def test_a_message_that_is_no_step_goes_to_the_runner_and_its_answer_comes_back() -> None:
    async with with_executor(Answering) as (executor, collected, task):
        await collected.wait_for(1)
        executor.inbox.put(FeatureRequest(feature="store", number=5, body=b""))
        assert (await collected.wait_for(2))[1] == FeatureAnswer(rank=0, feature="store", number=5, body=b"3")
        executor.inbox.put(Stop())
        await task


def test_a_runner_takes_no_messages_unless_it_says_so() -> None:
    with pytest.raises(AssertionError, match="takes no request of store"):
        FakeRunner().receive(FeatureRequest(feature="store", number=5, body=b""), list[Any]().append)


class Timeline(Runner):
    """A device with a clock of its own: a step takes until the next one is queued behind it, or until none has come
    for so long that none will; then it has idled.

    num_overlapped: steps that were queued while the one before them ran."""

    num_pages = 7

    def __init__(self, num_steps: int) -> None:
        self.num_overlapped = 0
        self.has_left = False
        self.raises_at = -1
        self._num_steps = num_steps
        self._num_queued = 0
        self._patience_s = 20.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._ended: list[threading.Event] = [threading.Event() for _ in range(num_steps)]
        self._thread.start()

    def launch(self, step: Step) -> "TimelinePending":
        with self._changed:
            self._num_queued += 1
            self._changed.notify()
        return TimelinePending(self, step.step_id, self._ended[step.step_id])

    def leave(self) -> None:
        self.has_left = True

    def _run(self) -> None:
        for number, ended in enumerate(self._ended[:-1]):
            with self._changed:
                overlaps = self._changed.wait_for(lambda: self._num_queued > number + 1, self._patience_s)  # noqa: B023
            self.num_overlapped += overlaps
            if not overlaps:
                self._patience_s = 0.0  # one is too many
            ended.set()
        with self._changed:
            self._changed.wait_for(lambda: self._num_queued == self._num_steps, self._patience_s)
        self._ended[-1].set()


@dataclass
class TimelinePending:
    device: Timeline
    step_id: int
    ended: threading.Event

    def ready(self) -> bool:
        return self.ended.is_set()

    def collect(self) -> StepDone:
        self.ended.wait()
        if self.step_id == self.device.raises_at:
            raise RuntimeError("an illegal memory access")
        return StepDone(rank=0, step_id=self.step_id, token_ids=b"")


class TwoInFlight(Collected):
    """The scheduler's end of the link, which answers each result with the next step."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.executor: Executor | None = None
        self._left = list(range(num_steps))[::-1]

    def put(self, message: Any) -> None:
        super().put(message)
        assert self.executor is not None
        for _ in range(2 if isinstance(message, WorkerReady) else 1):
            if self._left:
                self.executor.inbox.put(Step(step_id=self._left.pop()))


async def test_a_step_is_launched_while_the_one_before_it_runs() -> None:
    device, scheduler = Timeline(200), TwoInFlight(200)

    async with with_executor(lambda: device, scheduler) as (executor, collected, task):
        results = (await collected.wait_for(201))[1:]
        assert [result.step_id for result in results] == list(range(200))
        executor.inbox.put(Stop())
        await task
    assert device.num_overlapped == 199


async def test_a_step_that_fails_on_the_device_comes_after_the_results_before_it() -> None:
    device, scheduler = Timeline(9), TwoInFlight(9)
    device.raises_at = 5

    async with with_executor(lambda: device, scheduler) as (_, collected, task):
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            await asyncio.wait_for(task, far(20))
        assert [result.step_id for result in collected.messages[1:]] == list(range(5))
    assert device.has_left


async def test_steps_that_were_launched_are_collected_before_the_end() -> None:
    device = Timeline(2)

    async with with_executor(lambda: device) as (executor, collected, task):
        await collected.wait_for(1)
        for message in (Step(step_id=0), Step(step_id=1), Stop()):
            executor.inbox.put(message)
        await task
        assert [result.step_id for result in (await collected.wait_for(3))[1:]] == [0, 1]
    assert not device.has_left


async def test_an_exit_on_the_thread_is_a_failure_like_any_other() -> None:
    """Raised by a task it would end the event loop, and with it the server, without a word."""

    async with with_executor(lambda: sys.exit(9)) as (_, _, task):
        with pytest.raises(RuntimeError, match=r"SystemExit\(9\) on the device thread"):
            await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("when", ["loading", "running"])
async def test_a_failure_on_the_thread_is_the_actors_failure(when: str) -> None:
    def load() -> FakeRunner:
        if when == "loading":
            raise WeightsError("model.safetensors: cut short")
        return FakeRunner()

    async with with_executor(load) as (executor, collected, task):
        if when == "running":
            await collected.wait_for(1)
            executor.inbox.put(Step(step_id=99))
        with pytest.raises(WeightsError if when == "loading" else MemoryError):
            await asyncio.wait_for(task, far(5))


async def test_an_actor_that_is_cancelled_ends_its_thread() -> None:
    async with with_executor(FakeRunner) as (_, collected, task):
        await collected.wait_for(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
