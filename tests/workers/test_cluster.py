"""A head and its nodes on one event loop, with executors that load at once: who joins, is told what, and ends how."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.messages import Stop
from engine.plugins.support.rendezvous import serve_store
from engine.types.errors import ConfigError, EngineDied, WeightsError
from engine.types.notices import ExecutorsLost, ExecutorsReady
from engine.workers.cluster import node as node_module
from engine.workers.cluster.head import Head
from engine.workers.cluster.node import Node
from engine.workers.cluster.store import ClusterStore, Notice, our_release
from engine.workers.executors import Executors
from engine.workers.limits import RestartIntensity
from engine.workers.placement import ProcessExecutors
from tests.pace import far
from tests.workers.executors import children
from tests.workers.machines import KEY, cluster, configured, free_port
from tests.workers.test_placement import Heard

MODULE = "tests.workers.odd_executor"


class Scene:
    """A head with its executors, and nodes as they come."""

    def __init__(self, port: int, config: Config) -> None:
        self.port = port
        self.config = config
        self.heard = Heard()
        self.group: Executors | None = None
        self.engine: asyncio.Task[None] | None = None
        self.nodes: list[asyncio.Task[None]] = []

    def join(self, config: Config | None = None, **changes: Any) -> "asyncio.Task[None]":
        """One more node for rank 1."""
        node = Node(cluster(1, self.port, **changes), config or self.config, MODULE)
        self.nodes.append(asyncio.create_task(node.run()))
        return self.nodes[-1]

    async def ready(self) -> None:
        """Both ranks are."""
        await self.heard.next(ExecutorsReady)

    async def lost(self) -> str:
        """Why a generation was."""
        return str((await self.heard.next(ExecutorsLost)).reason)

    @contextlib.asynccontextmanager
    async def running(
        self, *, is_served: bool = False, meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[None]:
        """The head, until the block ends.  meanwhile: what happens while its engine is still being built."""
        async with Head(cluster(0, self.port, is_served=is_served), self.config) as head:
            if meanwhile is not None:
                await meanwhile()
            placement = ProcessExecutors(
                config=self.config, max_len=64, num_ranks=2, capacity=64, progress=False, module=MODULE, head=head
            )
            self.group = Executors(
                num_ranks=2, placement=placement, intensity=RestartIntensity(9, 100.0), step_timeout_s=0.0
            )
            self.group.connect(self.heard)
            self.engine = asyncio.create_task(self.group.run())
            yield
            self.group.inbox.put(Stop())
            await self.engine

    async def close(self) -> None:
        for node in self.nodes:
            node.cancel()
        await asyncio.gather(*self.nodes, return_exceptions=True)


@asynccontextmanager
async def on_two_machines(config: Config | None = None) -> AsyncIterator[Scene]:
    """A scene of which nothing is left at its end."""
    scene = Scene(free_port(), config or configured())
    async with asyncio.timeout(far(30)):
        try:
            yield scene
        finally:
            await scene.close()
    assert not children()


async def test_a_node_ends_well_with_its_head() -> None:
    async with on_two_machines() as scene:
        node = scene.join()
        async with scene.running():
            await scene.ready()
        await node


async def test_a_node_that_is_told_to_end_alone_does_and_the_next_one_takes_its_place() -> None:
    async with on_two_machines() as scene, scene.running():
        node = scene.join()
        await scene.ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await node
        assert await scene.lost() == "executor1 has left: its node was told to end"
        scene.join()
        await scene.ready()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Notice | None]:
    """What nodes have read on boards so far."""
    seen: list[Notice | None] = []
    read = ClusterStore.read

    def noted(board: ClusterStore) -> Notice | None:
        seen.append(read(board))
        return seen[-1]

    monkeypatch.setattr(ClusterStore, "read", noted)
    return seen


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_node_that_is_told_to_end_with_its_head_waits_for_it(
    looks: list[Notice | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_module, "LEAVE_GRACE_S", 0.1)

    with caplog.at_level(logging.INFO):
        async with on_two_machines() as scene:
            node = scene.join()
            async with Head(cluster(0, scene.port), scene.config) as head:
                head.follow(lambda: True)
                await until(lambda: any("rank 1 has found rank 0" in one for one in caplog.messages))
                await until(lambda: looks[-1] is not None and looks[-1].state == "leaving")
                so_far = len(looks)
                await until(lambda: len(looks) > so_far + 1)
                os.kill(os.getpid(), signal.SIGTERM)
                await until(lambda: len(looks) > so_far + 5)  # a quarter of a second each: more than its patience
                assert not node.done()
            await node


async def test_without_the_key_nobody_joins_and_both_sides_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with on_two_machines(configured(join_timeout_s=2)) as scene:
            with pytest.raises(EngineDied, match=r"^executor1 did not join within 2 s$"):
                async with scene.running():
                    with pytest.raises(
                        ConfigError, match=r"^rank 1: placement.cluster_key is not rank 0's, or a stranger"
                    ):
                        await scene.join(configured(key="another-key-of-32-characters-or-more"))
                    assert scene.engine is not None
                    await scene.engine
    refused = [one.getMessage() for one in caplog.records if "refused" in one.getMessage()]
    assert refused == ["rank 1 was refused: it has not our placement.cluster_key, or a stranger writes to the store"]
    assert KEY not in caplog.text


async def test_a_node_that_does_not_fit_fails_the_start_with_its_reason() -> None:
    async with on_two_machines() as scene:
        reason = "rank 1: WORLD_SIZE=3, but rank 0 has WORLD_SIZE=2"
        with pytest.raises(ConfigError, match=reason):
            async with scene.running():
                with pytest.raises(ConfigError, match=reason):
                    await scene.join(size=3)
                assert scene.engine is not None
                await scene.engine


async def test_so_it_does_if_it_has_come_and_gone_before_the_head_was_looking() -> None:
    async with on_two_machines() as scene:

        async def come_and_go() -> None:
            with pytest.raises(ConfigError, match="WORLD_SIZE=3"):
                await scene.join(size=3)
            await asyncio.sleep(0.6)  # the head has heard it: it listens four times a second

        with pytest.raises(ConfigError, match="rank 1: WORLD_SIZE=3, but rank 0 has WORLD_SIZE=2"):
            async with scene.running(meanwhile=come_and_go):
                assert scene.engine is not None
                await scene.engine


async def test_a_checkpoint_that_is_missing_there_fails_the_start_as_well() -> None:
    async with on_two_machines() as scene:
        elsewhere = build_config(scene.config, {"model": {"path": "/no/such/model"}})
        with pytest.raises(ConfigError, match=r"rank 1: '/no/such/model': no such directory"):
            async with scene.running():
                with pytest.raises(WeightsError, match="no such directory"):
                    await scene.join(elsewhere)
                assert scene.engine is not None
                await scene.engine


async def test_a_place_that_is_taken_twice_ends_the_generation_and_says_why() -> None:
    async with on_two_machines() as scene, scene.running():
        first = scene.join()
        await scene.ready()
        scene.join()
        assert "executor1 joins a second time: was its node started again, or is RANK=1" in await scene.lost()
        assert not first.done()


async def test_a_head_that_fails_tells_its_nodes_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with on_two_machines() as scene:
            node = scene.join()
            with pytest.raises(EngineDied, match="executor0 crashed"):
                async with Head(cluster(0, scene.port), scene.config):
                    await until(lambda: any("rank 1 has found rank 0" in one for one in caplog.messages))
                    raise EngineDied("executor0 crashed: KeyError: 'embed_tokens'")
            with pytest.raises(
                EngineDied, match=r"^rank 1: rank 0 has failed: executor0 crashed: KeyError: 'embed_tok"
            ):
                await node


async def test_a_head_whose_first_load_fails_ends_with_its_reason() -> None:
    async with on_two_machines(configured(name="no such thing")) as scene:
        scene.join()
        with pytest.raises(EngineDied, match=r"^executor[01] crashed: KeyError: 'embed_tokens'"):
            async with scene.running():
                assert scene.engine is not None
                await scene.engine


async def test_what_an_earlier_head_has_left_in_a_launchers_store_misleads_nobody(looks: list[Notice | None]) -> None:
    async with on_two_machines() as scene:
        store = serve_store("127.0.0.1", scene.port, 5)
        board = ClusterStore(store, KEY)
        board.post(
            Notice(our_release(), 2, state="failed", reason="long ago", nonce="old", endpoints=("", "tcp://x:1"))
        )
        board.beat()
        node = scene.join(is_served=True)
        await until(lambda: len(looks) > 1)
        async with scene.running(is_served=True):
            await scene.ready()
        await node


async def test_a_head_that_is_silent_is_gone() -> None:
    async with on_two_machines(configured(silence_timeout_s=0.5)) as scene:
        board = ClusterStore(serve_store("127.0.0.1", scene.port, 5), KEY)
        board.clear([1])
        board.post(Notice(our_release(), 2))
        node = scene.join()
        while not any(board.slots([1])):  # it has said that it is here
            board.beat()
            await asyncio.sleep(0.1)
        with pytest.raises(EngineDied, match=r"^rank 1: rank 0 is gone: no word of it for 0\.5 s$"):
            await node


async def test_a_store_that_nobody_serves_is_waited_for_so_long() -> None:
    async with on_two_machines(configured(join_timeout_s=0.3)) as scene:
        with pytest.raises(EngineDied, match=r"nobody listens at 127\.0\.0\.1:\d+ since 0\.3 s"):
            await scene.join()


async def test_a_store_without_a_head_is_waited_at_so_long() -> None:
    async with on_two_machines(configured(join_timeout_s=0.3)) as scene:
        store = serve_store("127.0.0.1", scene.port, 5)
        with pytest.raises(EngineDied, match=r"rank 0 has not shown itself at 127\.0\.0\.1:\d+ in 0\.3 s"):
            await scene.join()
        assert store is not None


async def test_a_port_that_is_taken_is_named() -> None:
    async with on_two_machines() as scene, Head(cluster(0, scene.port), scene.config):
        with pytest.raises(ConfigError, match=r"MASTER_PORT=127.0.0.1:\d+: no rendezvous store: Address already in"):
            await Head(cluster(0, scene.port), scene.config).__aenter__()
