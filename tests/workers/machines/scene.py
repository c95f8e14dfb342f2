"""A head and its nodes on one event loop, with executors that load at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.config import Config
from engine.messages import Stop
from engine.types.notices import ExecutorsLost, ExecutorsReady
from engine.workers.executors import Executors
from engine.workers.limits import RestartIntensity
from engine.workers.machines.head import Head
from engine.workers.machines.node import MachineNode
from engine.workers.placement import ProcessExecutors
from tests.pace import far
from tests.ports import free_port
from tests.workers.executors import children
from tests.workers.machines.processes import configured, launch, link_to
from tests.workers.test_placement import Heard

MODULE = "tests.workers.odd_executor"


class Scene:
    """A head with its executors, and nodes as they come.  settings: of the head and, changed, of nodes."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"link": link_to(free_port()), **settings}
        self.config = configured(**self.settings)
        self.heard = Heard()
        self.group: Executors | None = None
        self.engine: asyncio.Task[None] | None = None
        self.nodes: list[asyncio.Task[None]] = []

    def configured(self, **changes: Any) -> Config:
        """The configuration with changes."""
        return configured(**{**self.settings, **changes})

    def join(self, config: Config | None = None, size: int = 2) -> "asyncio.Task[None]":
        """One more process with RANK=1."""
        config = config or self.config
        self.nodes.append(asyncio.create_task(MachineNode(launch(1, config, size), config, MODULE).run()))
        return self.nodes[-1]

    async def ready(self) -> None:
        """Every rank has loaded."""
        await self.heard.next(ExecutorsReady)

    async def lost(self) -> str:
        """The reason for which a generation was lost."""
        return str((await self.heard.next(ExecutorsLost)).reason)

    def head(self) -> Head:
        """A head that is not started."""
        return Head(launch(0, self.config), self.config)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Head]:
        """The head and its engine, until the block ends."""
        async with self.head() as head:
            num_ranks = self.config.device.tensor_parallel
            placement = ProcessExecutors(
                config=self.config,
                max_len=64,
                num_ranks=num_ranks,
                capacity=64,
                progress=False,
                module=MODULE,
                machines=head,
            )
            self.group = Executors(
                num_ranks=num_ranks, placement=placement, intensity=RestartIntensity(9, 100.0), step_timeout_s=0.0
            )
            self.group.connect(self.heard)
            self.engine = asyncio.create_task(self.group.run())
            yield head
            self.group.inbox.put(Stop())
            await self.engine

    async def close(self) -> None:
        for node in self.nodes:
            node.cancel()
        await asyncio.gather(*self.nodes, return_exceptions=True)


@asynccontextmanager
async def on_two_machines(**settings: Any) -> AsyncIterator[Scene]:
    """A scene of which nothing is left at its end."""
    scene = Scene(**settings)
    async with asyncio.timeout(far(30)):
        try:
            yield scene
        finally:
            await scene.close()
    assert not children()
