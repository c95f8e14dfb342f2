"""What becomes of an executor process that misbehaves, told to whoever holds the executors."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import Config, build_config
from engine.messages import Step, StepDone, Stop
from engine.types.errors import EngineDied
from engine.types.notices import ExecutorsLost, ExecutorsReady
from engine.workers.executors import Executors
from engine.workers.limits import RestartIntensity
from engine.workers.placement import ProcessExecutors
from tests.pace import far
from tests.workers.executors import children
from tests.workers.odd_executor import EXITS, FINE, LARGE, OVERSIZED, RAISES


class Heard:
    """Stands where the scheduler does."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.arrived = asyncio.Event()

    def put(self, message: Any) -> None:
        self.messages.append(message)
        self.arrived.set()

    async def next(self, kind: type) -> Any:
        """The first message of a kind; it and those before it are taken out."""
        async with asyncio.timeout(far(20)):
            while True:
                for at, message in enumerate(self.messages):
                    if isinstance(message, kind):
                        del self.messages[: at + 1]
                        return message
                self.arrived.clear()
                await self.arrived.wait()


def start(name: str = "", max_restarts: int = 5, num_ranks: int = 1) -> tuple[Executors, Heard, "asyncio.Task[None]"]:
    config = build_config(Config(), {"model": {"name": name}})
    placement = ProcessExecutors(
        config=config,
        max_len=64,
        num_ranks=num_ranks,
        capacity=64,
        progress=False,
        module="tests.workers.odd_executor",
    )
    group = Executors(
        num_ranks=num_ranks, placement=placement, intensity=RestartIntensity(max_restarts, 100.0), step_timeout_s=0.0
    )
    heard = Heard()
    group.connect(heard)
    return group, heard, asyncio.ensure_future(group.run())


async def test_every_way_to_fail_is_named_and_the_next_process_serves() -> None:
    said = {
        OVERSIZED: "link executor0: StepDone of .* exceeds",
        EXITS: r"^executor0 ended with code 7$",
        RAISES: "the weights have changed under us",
    }
    group, heard, running = start()
    for step_id, reason in said.items():
        assert await heard.next(ExecutorsReady) == ExecutorsReady(num_pages=5)
        group.links[0].put(Step(step_id=step_id))
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError((await heard.next(ExecutorsLost)).reason)
    await heard.next(ExecutorsReady)
    group.links[0].put(Step(step_id=FINE))
    assert (await heard.next(StepDone)).step_id == FINE
    group.inbox.put(Stop())
    await asyncio.wait_for(running, far(10))
    assert group.num_restarts == len(said)
    assert not children()


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_where_ranks_meet_there_is_a_place_for_as_long_as_they_are_a_group(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    group, heard, running = start(num_ranks=num_ranks)
    places = []
    for _ in range(2):
        await heard.next(ExecutorsReady)
        places.append(os.listdir(tmp_path))
        assert len(places[-1]) == (num_ranks > 1), "of one rank nothing is left, of several where they meet"
        for link in group.links:
            link.put(Step(step_id=RAISES))
        await heard.next(ExecutorsLost)
    assert num_ranks == 1 or places[0] != places[1]
    group.inbox.put(Stop())
    await asyncio.wait_for(running, far(10))
    assert os.listdir(tmp_path) == []
    assert not children()


async def test_a_step_that_two_ranks_have_no_room_for_is_cut_in_the_next_generations_and_is_no_fault() -> None:
    group, heard, running = start(max_restarts=0, num_ranks=2)
    large = Step(step_id=LARGE, decode_rows=np.arange(12, dtype=np.int32).tobytes())
    for _ in range(2):  # a limit of 6, which is too much still, and of 3
        await heard.next(ExecutorsReady)
        for link in group.links:
            link.put(large)
        assert "no room for a step of" in (await heard.next(ExecutorsLost)).reason
    await heard.next(ExecutorsReady)
    for link in group.links:
        link.put(large)
    answers = [await heard.next(StepDone) for _ in group.links]
    assert sorted(one.rank for one in answers) == [0, 1]
    group.inbox.put(Stop())
    await asyncio.wait_for(running, far(10))
    assert group.num_restarts == 2
    assert not children()


async def test_a_first_load_that_fails_is_told_with_its_kind() -> None:
    _, _, running = start(name="no such thing")
    with pytest.raises(EngineDied, match="executor0 crashed: KeyError: 'embed_tokens'"):
        await asyncio.wait_for(running, far(20))
    assert not children()
