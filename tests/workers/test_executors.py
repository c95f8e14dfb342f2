"""The executors of an engine: they start, are watched, and are replaced all at once; what no longer helps is said."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from engine.actors.rank_results import RankResults, RanksDiverged
from engine.messages import Step, StepDone, Stop
from engine.types.errors import EngineDied, StepTooLarge, WeightsError
from engine.types.notices import ExecutorsLost, ExecutorsReady, LossExplained
from engine.workers.executors import Executors, ExecutorSlot, GenerationSettings
from engine.workers.group import Start, Watch
from engine.workers.limits import RestartIntensity
from engine.workers.link import LinkError
from engine.workers.messages import WorkerAlive, WorkerReady
from engine.workers.worker import Reports, WorkerLost
from tests.pace import far


class FakeRanks:
    """A generation that does what the test says."""

    def __init__(self, settings: GenerationSettings) -> None:
        self.settings = settings
        self.workers: list[FakeWorker] = []
        self.is_over = False

    def start(self, slot: ExecutorSlot, reports: Reports[StepDone]) -> "FakeWorker":
        self.workers.append(FakeWorker(reports))
        return self.workers[-1]

    @property
    def steps(self) -> list[list[Step]]:
        return [worker.steps for worker in self.workers]

    @property
    def ended(self) -> list[bool]:
        return [worker.ended for worker in self.workers]

    @property
    def killed(self) -> list[list[bool]]:
        return [worker.killed for worker in self.workers]

    def hear(self, rank: int, message: Any) -> None:
        self.workers[rank].reports.received(message)

    def ready(self, num_pages: int = 9) -> None:
        for rank in range(len(self.workers)):
            self.hear(rank, WorkerReady(num_pages=num_pages))

    def lose(self, rank: int = 0, reason: str = "executor0 was killed by SIGKILL", **details: Any) -> None:
        self.workers[rank].reports.lost(WorkerLost(reason, **details))


class FakeWorker:
    def __init__(self, reports: Reports[StepDone]) -> None:
        self.reports = reports
        self.steps: list[Step] = []
        self.broken = self.ended = False
        self.killed: list[bool] = []

    def put(self, step: Step) -> None:
        if self.broken:
            raise LinkError("link executor0: Step cannot be sent: Resource temporarily unavailable")
        self.steps.append(step)

    async def end(self) -> None:
        self.ended = True

    async def kill(self, *, is_stuck: bool) -> None:
        self.killed.append(is_stuck)


class FakePlacement:
    def __init__(self, *, can_kill: bool = True, silence_timeout_s: float = 0.0) -> None:
        self.can_kill = can_kill
        self.silence_s = silence_timeout_s
        self.join_s = 0.0
        self.started: list[FakeRanks] = []

    @contextmanager
    def generation(self, settings: GenerationSettings) -> Iterator[Start[StepDone, Step]]:
        self.started.append(ranks := FakeRanks(settings))
        try:
            yield ranks.start
        finally:
            ranks.is_over = True


class Bench:
    """A group under test, and what the scheduler has heard of it."""

    def __init__(
        self, placement: FakePlacement | None = None, *, num_ranks: int = 1, max_restarts: int = 3, step_s: float = 0.0
    ) -> None:
        self.placement = placement or FakePlacement()
        self.heard: list[Any] = []
        self.group = Executors(
            num_ranks=num_ranks,
            placement=self.placement,
            intensity=RestartIntensity(max_restarts, 100.0),
            step_timeout_s=step_s,
        )
        self.group.connect(self)
        self.task = asyncio.ensure_future(self.group.run())

    def put(self, message: Any) -> None:
        self.heard.append(message)

    async def generation(self, number: int) -> FakeRanks:
        async with asyncio.timeout(far(5)):
            while len(self.placement.started) < number:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.placement.started[number - 1]

    async def stop(self) -> None:
        self.group.inbox.put(Stop())
        await asyncio.wait_for(self.task, far(5))


@asynccontextmanager
async def leaving_nothing() -> AsyncIterator[None]:
    """No task is left at its end."""
    yield
    assert len(asyncio.all_tasks()) == 1, "the group left a task behind"


async def test_steps_and_results_pass_and_the_end_is_orderly() -> None:
    async with leaving_nothing():
        bench = Bench(num_ranks=2)
        ranks = await bench.generation(1)
        bench.group.links[0].put(Step(step_id=0))
        assert ranks.steps == [[], []], "nothing is sent before all are ready"
        ranks.ready()
        for link in bench.group.links:
            link.put(Step(step_id=1))
        ranks.hear(1, StepDone(rank=1, step_id=1, token_ids=b""))
        assert ranks.steps == [[Step(step_id=1)], [Step(step_id=1)]]
        assert bench.heard == [ExecutorsReady(num_pages=9), StepDone(rank=1, step_id=1, token_ids=b"")]
        await bench.stop()
        assert (ranks.ended, ranks.killed) == ([True, True], [[False], [False]])
        assert ranks.is_over


async def test_one_lost_rank_replaces_all_of_them_and_the_scheduler_hears_of_it_once() -> None:
    async with leaving_nothing():
        bench = Bench(num_ranks=2)
        first = await bench.generation(1)
        first.ready(7)
        bench.heard.clear()
        first.lose()
        assert bench.heard == [ExecutorsLost(reason="executor0 was killed by SIGKILL")], (
            "before anything else can happen"
        )
        first.lose(1, "executor1 was killed by SIGTERM")
        first.hear(0, StepDone(rank=0, step_id=4, token_ids=b"late"))
        bench.group.links[1].put(Step(step_id=5))
        second = await bench.generation(2)
        assert (first.killed, first.ended) == ([[False]] * 2, [False] * 2)
        assert (first.is_over, second.settings) == (True, GenerationSettings(7))
        assert first.steps == [[], []]
        assert len(bench.heard) == 1
        second.ready(7)
        bench.group.links[1].put(Step(step_id=6))
        assert second.steps == [[], [Step(step_id=6)]]
        assert bench.group.num_restarts == 1
        await bench.stop()


async def test_a_link_that_takes_nothing_is_a_lost_rank() -> None:
    async with leaving_nothing():
        bench = Bench()
        ranks = await bench.generation(1)
        ranks.ready()
        ranks.workers[0].broken = True
        bench.group.links[0].put(Step(step_id=0))
        bench.group.links[0].put(Step(step_id=1))
        await bench.generation(2)
        assert [type(one) for one in bench.heard] == [ExecutorsReady, ExecutorsLost]
        assert "Step cannot be sent" in bench.heard[-1].reason
        await bench.stop()


@pytest.mark.parametrize("max_restarts", [0, 2])
async def test_restarts_are_bounded_and_the_last_word_says_how_many_there_were(max_restarts: int) -> None:
    async with leaving_nothing():
        bench = Bench(max_restarts=max_restarts)
        for number in range(1, max_restarts + 2):
            ranks = await bench.generation(number)
            ranks.ready()
            await asyncio.sleep(0)
            ranks.lose()
        said = f"{max_restarts} restarts in 100 s did not help" if max_restarts else "max_restarts is 0"
        with pytest.raises(EngineDied, match=f"executor0 was killed by SIGKILL; .*{said}"):
            await bench.task
        assert len(bench.placement.started) == max_restarts + 1


@pytest.mark.parametrize(("executors_work", "num_losses"), [(True, 12), (False, 7)])
async def test_losses_that_are_explained_count_as_none_or_as_one_if_executors_may_be_the_cause(
    executors_work: bool, num_losses: int
) -> None:
    async with leaving_nothing():
        bench = Bench(max_restarts=3)
        for number in range(1, 13):
            ranks = await bench.generation(number)
            ranks.ready()
            await asyncio.sleep(0)
            if number % 3 == 0:
                # The scheduler hears of a loss and answers before the group judges it.
                asyncio.get_running_loop().call_soon(
                    bench.group.explain, LossExplained(num_losses=3, executors_work=executors_work)
                )
            ranks.lose()
            if number > num_losses:
                with pytest.raises(EngineDied, match="3 restarts in 100 s did not help"):
                    await bench.task
                return
        (await bench.generation(13)).ready()
        assert bench.group.num_restarts == 12
        await bench.stop()


async def test_what_explains_one_loss_explains_no_other() -> None:
    async with leaving_nothing():
        bench = Bench(max_restarts=1)
        for number, error in enumerate((StepTooLarge("no room", 9), None, None), start=1):
            ranks = await bench.generation(number)
            ranks.ready()
            await asyncio.sleep(0)
            if number == 1:
                bench.group.explain(LossExplained(num_losses=3, executors_work=True))
            ranks.lose(error=error)
        with pytest.raises(EngineDied, match="1 restarts in 100 s did not help"):
            await bench.task


async def test_a_step_that_was_too_large_is_no_fault_and_the_next_generation_cuts_steps() -> None:
    async with leaving_nothing():
        bench = Bench(num_ranks=2, max_restarts=0)
        for number, num_tokens in enumerate((48, 24, 3), start=1):
            ranks = await bench.generation(number)
            ranks.ready(7)
            await asyncio.sleep(0)
            losses = [(1, "no room", {"error": StepTooLarge("no room", num_tokens)}), (0, "left alone", {})]
            for rank, reason, details in losses if number % 2 else reversed(losses):
                ranks.lose(rank, reason, **details)
        last = await bench.generation(4)
        told = [one for one in bench.heard if isinstance(one, ExecutorsLost)]
        assert [one.is_fault for one in told] == [True, False] * 3, "each loss, and then that it was none"
        settings = [GenerationSettings(), *(GenerationSettings(7, most) for most in (24, 12, 1))]
        assert [one.settings for one in bench.placement.started] == settings
        assert bench.group.num_restarts == 3
        last.ready(7)
        await bench.stop()


async def test_what_the_first_load_raises_is_the_starts_own_error() -> None:
    async with leaving_nothing():
        bench = Bench()
        ranks = await bench.generation(1)
        ranks.lose(error=WeightsError("model.safetensors: cut short"))
        with pytest.raises(WeightsError, match="cut short"):
            await bench.task


async def test_a_first_load_that_ends_without_a_word_is_not_tried_again() -> None:
    async with leaving_nothing():
        bench = Bench()
        (await bench.generation(1)).lose()
        with pytest.raises(EngineDied, match="killed by SIGKILL while it started"):
            await bench.task


async def test_a_reload_that_fails_counts_as_a_restart_like_any_other() -> None:
    async with leaving_nothing():
        bench = Bench(max_restarts=2)
        (await bench.generation(1)).ready()
        await asyncio.sleep(0)
        bench.placement.started[0].lose()
        (await bench.generation(2)).lose(error=WeightsError("device busy"))
        (await bench.generation(3)).ready()
        await asyncio.sleep(0)
        assert not bench.task.done()
        bench.placement.started[2].lose()
        with pytest.raises(EngineDied):
            await bench.task


async def test_what_cannot_be_cured_here_is_not_tried() -> None:
    async with leaving_nothing():
        bench = Bench()
        (await bench.generation(1)).ready()
        await asyncio.sleep(0)
        bench.placement.started[0].lose(reason="executor0 crashed", curable=False)
        with pytest.raises(EngineDied, match=r"executor0 crashed; .* placement\.executor = 'process'"):
            await bench.task
        assert len(bench.placement.started) == 1


@pytest.mark.parametrize("can_kill", [True, False])
async def test_a_step_that_takes_too_long_is_a_hang(can_kill: bool) -> None:
    async with leaving_nothing():
        bench = Bench(FakePlacement(can_kill=can_kill), step_s=0.08)
        ranks = await bench.generation(1)
        ranks.ready()
        await asyncio.sleep(0)
        bench.group.links[0].put(Step(step_id=0))
        if can_kill:
            await bench.generation(2)
            assert bench.heard[-1] == ExecutorsLost(reason="executor0 does not finish its step")
            await bench.stop()
        else:
            with pytest.raises(EngineDied, match="does not finish its step; this process cannot repair it"):
                await bench.task
        assert ranks.killed == [[True]]


async def test_a_rank_that_says_nothing_for_too_long_is_gone_and_one_that_does_is_not() -> None:
    async with leaving_nothing():
        bench = Bench(FakePlacement(silence_timeout_s=0.16), num_ranks=2)
        ranks = await bench.generation(1)
        ranks.ready()

        async def beat() -> None:
            while True:
                ranks.hear(0, WorkerAlive())
                await asyncio.sleep(0.01)

        beating = asyncio.ensure_future(beat())
        await bench.generation(2)
        beating.cancel()
        assert bench.heard[-1] == ExecutorsLost(reason="executor1 has stopped answering")
        await asyncio.sleep(0)
        await bench.stop()


async def test_a_rank_that_falls_silent_while_it_loads_is_gone_and_one_that_has_not_come_is_waited_for() -> None:
    async with leaving_nothing():
        bench = Bench(FakePlacement(silence_timeout_s=0.016), num_ranks=3)
        ranks = await bench.generation(1)
        ranks.hear(0, WorkerAlive())
        ranks.hear(0, WorkerReady(num_pages=9))
        ranks.hear(1, WorkerAlive())
        with pytest.raises(EngineDied, match="executor1 has stopped answering while it started"):
            await asyncio.wait_for(bench.task, far(5))


async def test_ranks_that_do_not_come_again_are_the_end_however_many_restarts_are_left() -> None:
    async with leaving_nothing():
        placement = FakePlacement()
        placement.join_s = 0.05
        bench = Bench(placement, num_ranks=2, step_s=0.08, max_restarts=9)
        (await bench.generation(1)).ready()
        await asyncio.sleep(0)
        bench.placement.started[0].lose()
        (await bench.generation(2)).hear(0, WorkerAlive())
        with pytest.raises(EngineDied, match=r"^executor1 did not join within 0.05 s$"):
            await asyncio.wait_for(bench.task, far(5))
        assert len(placement.started) == 2


async def test_cancelling_the_group_ends_its_ranks() -> None:
    async with leaving_nothing():
        bench = Bench()
        ranks = await bench.generation(1)
        bench.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bench.task
        assert ranks.killed == [[False]]


def test_a_watch_counts_ticks_since_the_oldest_step_began() -> None:
    watch = Watch(step_ticks=2, silence_ticks=0)
    assert [watch.tick() for _ in range(5)] == [None] * 5, "an idle rank is not late"
    watch.sent()
    watch.sent()
    assert [watch.tick(), watch.tick()] == [None, None]
    watch.answered()  # the second one starts now
    assert [watch.tick(), watch.tick(), watch.tick()] == [None, None, "does not finish its step"]
    watch.answered()
    assert watch.tick() is None


def test_intensity_forgets_what_is_long_ago() -> None:
    intensity = RestartIntensity(2, 10.0)
    assert [intensity.allows(now) for now in (0.0, 1.0, 2.0, 9.9, 10.0, 10.5, 11.0)] == [
        True,
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_step_is_done_when_every_rank_says_so_and_ranks_that_disagree_are_a_failure() -> None:
    results = RankResults(3)
    done = [StepDone(rank=rank, step_id=0, token_ids=b"abcd") for rank in range(3)]
    assert [results.add(done[1]), results.add(done[0]), results.add(done[2])] == [None, None, done[0]]
    results.add(StepDone(rank=1, step_id=1, token_ids=b"abcd"))
    results.clear()
    assert [results.add(StepDone(rank=rank, step_id=5, token_ids=b"abcd")) is not None for rank in range(3)] == [
        False,
        False,
        True,
    ]
    results.add(StepDone(rank=0, step_id=6, token_ids=b"abcd"))
    results.add(StepDone(rank=2, step_id=6, token_ids=b"abcd"))
    with pytest.raises(RanksDiverged, match="step 6: rank 1 sampled other tokens than rank 0"):
        results.add(StepDone(rank=1, step_id=6, token_ids=b"abce"))
