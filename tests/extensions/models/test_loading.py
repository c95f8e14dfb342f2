"""Which models are loaded, which leave for others and which wait, without processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.types.errors import RequestError
from server.extensions.models import models as models_module
from server.extensions.models.models import Models
from server.proxy.replica import State
from tests.extensions.models.fake_model import FakeModel
from tests.pace import at_some_pace, far, turns

MB = 1 << 20
SOON_S = 20.0


class Clock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@asynccontextmanager
async def loading(*, budget_mb: int = 0, **given: dict) -> AsyncIterator[tuple[Models, dict[str, FakeModel]]]:
    """Models a, b and c, or those that are given with what their tables have."""
    fakes = [FakeModel(name, **table) for name, table in (given or {name: {} for name in "abc"}).items()]
    models = Models(fakes, budget_mb * MB, Clock())
    async with asyncio.timeout(far(SOON_S)):
        yield models, {one.name: one for one in fakes}
        await models.stop()
    assert models.num_open == sum(one.num_wanted for one in fakes) == 0
    assert {one.state for one in fakes} == {State.STOPPED}


async def ask(models: Models, model: FakeModel, within_s: float = SOON_S) -> None:
    with models.wanted(model):
        await models.loaded(model, within_s)


async def test_first_requests_at_once_load_a_model_once() -> None:
    async with loading() as (models, fakes):
        fakes["a"].gate.clear()
        asking = [asyncio.create_task(ask(models, fakes["a"])) for _ in range(5)]
        await turns()
        assert (fakes["a"].num_wanted, fakes["a"].began) == (5, ["load"])
        fakes["a"].gate.set()
        await asyncio.gather(*asking)
        await ask(models, fakes["a"])
        assert fakes["a"].began == ["load"]


async def test_a_name_chooses_the_model_and_the_first_is_the_default() -> None:
    async with loading() as (models, fakes):
        assert (models.find("b"), models.find(None), models.find("default")) == (fakes["b"], fakes["a"], fakes["a"])
        with pytest.raises(RequestError, match="'d' does not exist; this server has 'a', 'b', 'c'") as found:
            models.find("d")
        assert (found.value.status, found.value.code) == (404, "model_not_found")


async def test_a_load_that_takes_too_long_is_a_503_and_goes_on() -> None:
    async with loading() as (models, fakes):
        fakes["a"].gate.clear()
        asking = asyncio.create_task(ask(models, fakes["a"]))
        await turns()
        with pytest.raises(RequestError, match="is being loaded") as found:
            await ask(models, fakes["a"], 0.01)
        assert (found.value.status, found.value.retry_after_s) == (503, 5)
        fakes["a"].gate.set()
        await asking
        await ask(models, fakes["a"])
        assert fakes["a"].began == ["load"]


@at_some_pace
async def test_a_load_that_fails_tells_its_reason_and_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, pace: float
) -> None:
    monkeypatch.setattr(models_module, "FAILED_FOR_S", 0.2 * pace)
    async with loading() as (models, fakes):
        fakes["a"].fails = "no weights"
        for _ in range(2):  # the second one gets the same reason without another load
            with pytest.raises(RequestError, match="'a' cannot be loaded: no weights") as found:
                await ask(models, fakes["a"])
            assert (found.value.status, found.value.retry_after_s) == (503, 0)
        assert (fakes["a"].num_failures, fakes["a"].began) == (1, ["load"])
        await ask(models, fakes["b"])  # others go on
        fakes["a"].fails = ""
        while fakes["a"].refusal is not None:
            await asyncio.sleep(0.01)
        await ask(models, fakes["a"])


async def test_the_idle_model_used_longest_ago_leaves_for_another() -> None:
    async with loading(budget_mb=25) as (models, fakes):
        a, b, c = fakes.values()
        await ask(models, a)
        await ask(models, b)
        await ask(models, a)
        await ask(models, c)
        assert (a.state, b.state, c.state) == (State.READY, State.STOPPED, State.READY)


async def test_a_model_in_use_stays_whoever_waits_and_leaves_once_it_is_idle() -> None:
    async with loading(budget_mb=20) as (models, fakes):
        a, b, c = fakes.values()
        await ask(models, b)
        with models.wanted(a):
            await models.loaded(a, SOON_S)
            await ask(models, c)  # b, which was used later, leaves for it
            assert (a.state, b.state, c.state) == (State.READY, State.STOPPED, State.READY)
            with models.wanted(c):
                waiting = asyncio.create_task(ask(models, b))
                with pytest.raises(RequestError, match="waits for memory that other models use"):
                    await ask(models, b, 0.01)
                assert (a.began, c.began, waiting.done()) == (["load"], ["load"], False)
        await waiting
        assert (b.state, State.STOPPED in (a.state, c.state)) == (State.READY, True)


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    async with loading(budget_mb=15) as (models, fakes):
        a, b, _ = fakes.values()
        with models.wanted(a):
            await models.loaded(a, SOON_S)
            waiting = asyncio.create_task(ask(models, b))
            await turns()
            waiting.cancel()
            await asyncio.wait([waiting])
            await models.bring(b)
            assert (b.num_wanted, b.began) == (0, [])  # nobody wants it any more
        await ask(models, b)
        assert (a.state, b.state) == (State.STOPPED, State.READY)


async def test_a_model_that_is_larger_than_the_budget_is_loaded_alone() -> None:
    async with loading(budget_mb=15, small={}, large={"megabytes": 40}) as (models, fakes):
        await ask(models, fakes["small"])
        await ask(models, fakes["large"])
        assert fakes["small"].state is State.STOPPED
        assert fakes["large"].state is State.READY


async def test_the_start_loads_what_fits_and_unloads_nothing_for_it() -> None:
    async with loading(budget_mb=15, a={}, b={}, c={"load": "demand"}) as (models, fakes):
        await models.start()
        assert [one.state for one in fakes.values()] == [State.READY, State.STOPPED, State.STOPPED]
        assert fakes["a"].began == ["load"]


async def test_an_idle_model_is_unloaded_after_its_time_and_one_in_use_is_not() -> None:
    async with loading(a={"unload_after_s": 0.02}) as (models, fakes):
        model = fakes["a"]
        with models.wanted(model):
            await models.loaded(model, SOON_S)
            await asyncio.sleep(0.05)
            assert model.state is State.READY
        while model.state is not State.STOPPED:
            await asyncio.sleep(0.005)
        await ask(models, model)
        assert model.began == ["load", "unload", "load"]


async def test_a_stop_ends_loads_and_tells_those_who_wait() -> None:
    async with loading() as (models, fakes):
        fakes["a"].gate.clear()
        waiting = asyncio.create_task(ask(models, fakes["a"]))
        await turns()
        assert not await models.drain(0.01)
        await models.stop()
        with pytest.raises(RequestError):
            await waiting


async def test_a_start_that_is_given_up_leaves_its_load_to_those_who_wait() -> None:
    async with loading() as (models, fakes):
        fakes["a"].gate.clear()
        starting = asyncio.create_task(models.start())
        while not fakes["a"].began:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(ask(models, fakes["a"]))
        await turns()
        starting.cancel()
        draining = asyncio.create_task(models.drain(SOON_S))
        await turns()
        fakes["a"].gate.set()
        await waiting
        assert await draining
        assert (fakes["a"].began, fakes["b"].began) == (["load"], [])
