"""One of several models and its process: how it is started, found dead and ended."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.config import Config, build_config
from engine.host.memory import resident_bytes
from engine.types.errors import CallboardError, RequestError
from engine.workers import placement
from server.extensions.models import model as model_module
from server.extensions.models.configuration import ServedModel
from server.extensions.models.model import ModelReplica
from server.extensions.models.settings import ModelTable
from server.proxy.replica import State
from tests.pace import far


@asynccontextmanager
async def a_model(path: str = "serve") -> AsyncIterator[ModelReplica]:
    config = build_config(Config(), {"model": {"path": path, "name": "m"}})
    model = ModelReplica(ServedModel(ModelTable(name="m"), config))
    try:
        async with asyncio.timeout(far(20)):
            yield model
    finally:
        if model.state is State.READY:
            model.unload()
        await model.unloaded()


@pytest.fixture(autouse=True)
def _without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "MODULE", "tests.extensions.models.fake_process")


async def test_it_is_loaded_killed_loaded_again_and_unloaded() -> None:
    async with a_model() as model:
        for num_losses in range(2):
            await model.load()
            assert (model.state, model.num_lost) == (State.READY, num_losses)
            assert model.url
            assert model.card is not None
            assert model.card.max_model_len == 8
            assert model.choose([], []) is model
            if num_losses == 0:
                os.kill(model.pid, signal.SIGKILL)
                while model.state is not State.STOPPED:
                    await asyncio.sleep(0.01)
        assert model.num_bytes == pytest.approx(resident_bytes(model.pid), rel=0.2)
        assert model.num_bytes > 1 << 20
        model.unload()
        assert model.state is State.DRAINING
        await model.unloaded()
        assert (model.state, model.url, model.loaded_bytes) == (State.STOPPED, "", 0)
        assert resident_bytes(model.pid) == 0


@pytest.mark.parametrize("path, reason", [("die", "m ended with code 3 while it started"), ("fail", "m: no weights")])
async def test_a_load_that_fails_says_why_and_tells_no_path(path: str, reason: str) -> None:
    async with a_model(path) as model:
        with pytest.raises(CallboardError, match=f"^{reason}$"):
            await model.load()
        assert model.state is State.STOPPED


async def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    async with a_model() as model:
        monkeypatch.setattr(placement, "Child", refuse)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="no more processes"):
            await model.load()
        assert os.listdir("/proc/self/fd") == before
        assert (model.state, model.loaded_bytes) == (State.STOPPED, 0)


async def test_a_process_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_model("stay") as model:
        monkeypatch.setattr(model_module, "END_TIMEOUT_S", 0.05)
        await model.load()
        model.unload()
        await model.unloaded()
        assert model.state is State.STOPPED


async def test_a_broken_connection_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_model() as model:
        await model.load()
        asked: list[str] = []
        model.bring = lambda: asked.append("bring")
        model.lose(model, "reset by peer", "http://elsewhere")  # of an earlier process
        assert model.state is State.READY
        model.lose(model, "reset by peer", model.url)
        assert (model.state, asked) == (State.STARTING, ["bring"])
        with pytest.raises(RequestError, match="was lost") as found:
            model.choose([], [])
        assert found.value.status == 503
        await model.settle()
        assert model.state is State.READY
        os.kill(model.pid, signal.SIGKILL)
        model.lose(model, "reset by peer", model.url)
        await model.settle()
        assert (model.state, model.num_lost) == (State.STOPPED, 2)
