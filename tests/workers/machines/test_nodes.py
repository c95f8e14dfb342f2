"""A head and its nodes: which may join, what they are sent, and how each of them ends."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import pytest
import zmq

from engine.config import build_config
from engine.messages import Step, StepDone
from engine.types.errors import ConfigError, EngineDied
from engine.workers.machines import head as head_module
from engine.workers.machines import node as node_module
from engine.workers.machines.link import node_keys
from tests.workers.executors import children
from tests.workers.machines.processes import KEY
from tests.workers.machines.scene import on_two_machines
from tests.workers.odd_executor import FINE


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_node_ends_well_with_its_head() -> None:
    async with on_two_machines() as scene:
        node = scene.join()
        async with scene.running():
            await scene.ready()
        await node


async def test_a_step_is_done_by_the_ranks_of_both_which_each_process_shares() -> None:
    async with on_two_machines(num_ranks=4) as scene:
        node = scene.join()
        async with scene.running():
            await scene.ready()
            assert scene.group is not None
            for link in scene.group.links:
                link.put(Step(step_id=FINE))
            assert {(await scene.heard.next(StepDone)).rank for _ in range(4)} == {0, 1, 2, 3}
        await node


async def test_a_rank_that_is_killed_is_started_again_with_the_others() -> None:
    async with on_two_machines() as scene, scene.running():
        scene.join()
        await scene.ready()
        before = children()
        assert len(before) == 2
        os.kill(before[1], signal.SIGKILL)
        assert "was killed by SIGKILL" in await scene.lost()
        await scene.ready()
        assert len(children()) == 2
        assert not set(before) & set(children())


async def test_a_node_that_is_asked_to_end_alone_does_and_the_next_one_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_module, "LEAVE_GRACE_S", 0.1)
    async with on_two_machines() as scene, scene.running():
        node = scene.join()
        await scene.ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await node
        assert await scene.lost() == "executor1 has left: its process was asked to end"
        scene.join()
        await scene.ready()


async def test_a_node_that_is_asked_to_end_with_its_head_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "LEAVE_GRACE_S", 0.1)
    async with on_two_machines() as scene:
        node = scene.join()
        async with scene.running() as head:
            await scene.ready()
            head.is_draining = lambda: True
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert not node.done()
        await node


async def test_a_second_signal_ends_a_node_at_once() -> None:
    async with on_two_machines() as scene, scene.running() as head:
        node = scene.join()
        await scene.ready()
        head.is_draining = lambda: True
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        await node
        await scene.lost()


async def test_without_the_key_a_process_does_not_join_and_both_sides_log_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with on_two_machines(join_timeout_s=5) as scene:
            with pytest.raises(EngineDied, match=r"^executor1 did not join within 5 s$"):
                async with scene.running():
                    with pytest.raises(ConfigError, match=r"^RANK=1: .* refuses the connection: "):
                        await scene.join(scene.configured(key="another-key-of-32-characters-or-more"))
                    assert scene.engine is not None
                    await scene.engine
    assert "link node1: the other end was refused: it does not have our placement.cluster_key" in caplog.messages
    assert KEY not in caplog.text


async def test_what_is_no_message_is_refused_and_the_link_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with on_two_machines() as scene, scene.running() as head:
        keys, client = node_keys(KEY, 1)
        context = zmq.Context()
        stranger = context.socket(zmq.PAIR)
        stranger.curve_publickey, stranger.curve_secretkey = client.own.public, client.own.secret
        stranger.curve_serverkey = keys.public
        stranger.connect(f"tcp://{head.launch.address(1)}")
        stranger.send(b"\x80\x04cposix\nsystem\n.")  # a pickle
        await until(lambda: any("link node1: refused: " in one for one in caplog.messages))
        stranger.close(linger=0)
        context.term()
        scene.join()
        await scene.ready()


async def test_a_node_that_does_not_fit_fails_the_start_with_its_reason() -> None:
    async with on_two_machines() as scene:
        reason = "RANK=1: device.tensor_parallel is 4, at RANK=0 2"
        with pytest.raises(ConfigError, match=reason):
            async with scene.running():
                with pytest.raises(ConfigError, match=reason):
                    await scene.join(scene.configured(num_ranks=4))
                assert scene.engine is not None
                await scene.engine


async def test_a_node_that_has_come_and_gone_before_the_engine_started_fails_it_as_well() -> None:
    async with on_two_machines() as scene:
        with pytest.raises(ConfigError, match=r"RANK=1: .*tensor_parallel is 4"):
            async with scene.head() as head:
                with pytest.raises(ConfigError, match="tensor_parallel is 4"):
                    await scene.join(scene.configured(num_ranks=4))
                head.start(1, "tcp://127.0.0.1:1", node_keys(KEY, 1)[1], lambda how, error: None)


async def test_a_checkpoint_that_is_missing_there_fails_the_start() -> None:
    async with on_two_machines() as scene:
        elsewhere = build_config(scene.config, {"model": {"path": "/no/such/model"}})
        reason = "RANK=1: '/no/such/model': no such directory"
        with pytest.raises(ConfigError, match=reason):
            async with scene.running():
                with pytest.raises(ConfigError, match=reason):
                    await scene.join(elsewhere)
                assert scene.engine is not None
                await scene.engine


async def test_a_second_process_with_the_same_rank_waits_until_the_first_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "ATTEMPT_S", 0.5)
    async with on_two_machines() as scene, scene.running():
        first = scene.join()
        await scene.ready()
        second = scene.join()
        await asyncio.sleep(1.0)
        assert len(children()) == 2
        first.cancel()
        await scene.lost()
        await scene.ready()
        assert not second.done()


async def test_a_head_that_fails_sends_its_reason_to_its_nodes() -> None:
    async with on_two_machines() as scene:
        node = scene.join()
        with pytest.raises(EngineDied, match="executor0 crashed"):
            async with scene.running():
                await scene.ready()
                assert scene.engine is not None
                scene.engine.cancel()
                await asyncio.wait((scene.engine,))
                raise EngineDied("executor0 crashed: KeyError: 'embed_tokens'")
        with pytest.raises(EngineDied, match=r"^RANK=1: RANK=0 has failed: executor0 crashed: KeyError: 'embed_tok"):
            await node


async def test_a_head_whose_first_load_fails_ends_with_its_reason() -> None:
    async with on_two_machines(name="no such thing") as scene:
        scene.join()
        with pytest.raises(EngineDied, match=r"^executor[01] crashed: KeyError: 'embed_tokens'"):
            async with scene.running():
                assert scene.engine is not None
                await scene.engine


async def test_a_head_that_starts_again_finds_its_nodes() -> None:
    async with on_two_machines() as scene:
        node = scene.join()
        async with scene.running() as head:
            await scene.ready()
            for one in head._nodes.values():  # as if the head was killed
                one.is_away.set()
            assert scene.engine is not None
            scene.engine.cancel()
            await asyncio.wait((scene.engine,))
            scene.engine = asyncio.create_task(asyncio.sleep(0))
        await until(lambda: not children())
        async with scene.running():
            await scene.ready()
        await node


async def test_a_head_that_does_not_come_is_waited_for_so_long() -> None:
    async with on_two_machines(join_timeout_s=0.3) as scene:
        with pytest.raises(EngineDied, match=r"^RANK=1: RANK=0 has not answered at 127\.0\.0\.1:\d+ for 0\.3 s: is it"):
            await scene.join()


async def test_a_port_that_is_taken_is_named() -> None:
    async with on_two_machines() as scene, scene.head():
        with pytest.raises(ConfigError, match=r"placement.link: link node1: cannot listen on .*: Address already in"):
            await scene.head().__aenter__()
