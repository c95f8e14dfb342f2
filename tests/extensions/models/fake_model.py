"""A model without a process: it loads when a test lets it."""

import asyncio

from engine.config import Config
from engine.types.errors import CallboardError
from server.extensions.models.configuration import ServedModel
from server.extensions.models.model import ModelReplica
from server.extensions.models.settings import ModelTable
from server.proxy.replica import State


class FakeModel(ModelReplica):
    """Loads when ``gate`` is open.  fails: with which reason it cannot be loaded."""

    def __init__(self, name: str, megabytes: int = 10, **table: object) -> None:
        super().__init__(ServedModel(ModelTable(name=name, memory_mb=megabytes, **table), Config()))
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = ""
        self.began: list[str] = []

    async def load(self) -> None:
        self.began.append("load")
        self._set(State.STARTING)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self._set(State.STOPPED)
            raise
        if self.fails:
            self._set(State.STOPPED)
            raise CallboardError(self.fails)
        await self.listen()
        self._set(State.READY)

    async def listen(self) -> None:
        """Nothing asks it anything."""

    def unload(self) -> None:
        assert not self.num_wanted or self.server_leaves
        self.began.append("unload")
        self._set(State.DRAINING)

    async def unloaded(self) -> None:
        await asyncio.sleep(0)
        self._set(State.STOPPED)
