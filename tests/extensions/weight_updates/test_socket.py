"""Weights by a Unix socket: memory itself is passed, whole or as a delta, and what is wrong changes nothing."""

import asyncio
import json
import os
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from callboard.weights import send_delta, send_weights
from engine.actors.operations import Operate
from engine.features.weight_updates.engine import Describe, UpdateWeights, WeightsState
from engine.features.weight_updates.memory import write_tensors
from engine.types.errors import ConfigError, RequestError, WeightsError
from server.extensions.weight_updates.engine_weights import MOST_ASKED, EngineWeights
from server.extensions.weight_updates.socket import WeightsSocket
from tests.extensions.weight_updates.trainer import DEMO, choice, said
from tests.server.live_system import LiveSystem

NAME = "model.norm.weight"


def test_a_trainer_passes_tensors_and_then_deltas(live: LiveSystem, storage: Path) -> None:
    path = storage / "weights.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    first, second = (
        load_file(DEMO / "model.safetensors"),
        load_file(storage / "weights" / "step-1" / "model.safetensors"),
    )
    assert said(live, "POST", "/update_weights", {"path": str(DEMO)})[0] == 200
    before = choice(live)["logprobs"]
    assert said(live, "POST", "/update_weights", {"path": "step-1"})[0] == 200
    expected = choice(live)["logprobs"]
    state = send_weights(path, first, version="memory", mode="finish")
    assert state["weight_version"] == "memory"
    assert choice(live)["logprobs"] == before
    names = sorted(first)[::2]
    half = {**first, **{name: second[name] for name in names}}
    state = send_delta(path, first, half, base=state["digest"], version="half")
    assert choice(live)["logprobs"] not in (before, expected)
    stale = state["digest"]
    changed = {name: one.clone() for name, one in second.items()}
    changed[NAME][3] = first[NAME][3]
    state = send_delta(path, half, changed, base=state["digest"])
    state = send_delta(path, changed, second, base=state["digest"], version="sparse")
    assert choice(live)["logprobs"] == expected
    for fields in ({"base": stale}, {"base": state["digest"], "digest": "0"}, {"base": state["digest"], "mode": "x"}):
        with pytest.raises(WeightsError):
            send_delta(path, first, half, **fields)  # type: ignore[arg-type]
    assert choice(live)["logprobs"] == expected
    assert choice(live)["weight_versions"] == [[0, "sparse"]]


def test_what_is_no_message_is_answered_and_the_next_one_is_served(live: LiveSystem, storage: Path) -> None:
    path = str(storage / "weights.sock")
    for line, descriptors in ((b"{}\n", 0), (b"x\n", 1), (b'{"path": "x"}\n', 1), (b"{}", 1), (b"{}\n", 2)):
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(descriptors)]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            socket.send_fds(connection, [line], given)
            connection.shutdown(socket.SHUT_WR)
            assert b"error" in connection.recv(1 << 16)
        for one in given:
            os.close(one)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)  # and goes
    assert send_weights(path, {NAME: load_file(DEMO / "model.safetensors")[NAME]}, version="next")["number"] > 0
    with pytest.raises(WeightsError, match="no-such"):
        send_weights("/tmp/no-such-socket", {})


def test_no_descriptor_stays_open(live: LiveSystem, storage: Path) -> None:
    tensors = {NAME: load_file(DEMO / "model.safetensors")[NAME]}
    counts = []
    for _ in range(6):
        send_weights(storage / "weights.sock", tensors)
        with pytest.raises(WeightsError):
            send_weights(storage / "weights.sock", {"other": tensors[NAME]})
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] - counts[1] < 4, "one that stays open of each update would make it four"


def test_a_second_server_leaves_the_socket_of_the_first_one_alone(live: LiveSystem, storage: Path) -> None:
    with pytest.raises(ConfigError, match="another server listens there"):
        WeightsSocket(storage / "weights.sock", EngineWeights(None), 1.0).start()
    assert send_weights(storage / "weights.sock", {NAME: load_file(DEMO / "model.safetensors")[NAME]})["number"]


async def test_a_client_that_sends_nothing_does_not_delay_the_end(tmp_path: Path) -> None:
    listener = WeightsSocket(tmp_path / "one.sock", EngineWeights(None), 60.0)
    listener.start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "one.sock"))
        while not any(one.name.startswith(("asyncio_", "uvloop_")) for one in threading.enumerate()):
            await asyncio.sleep(0.01)
        await listener.stop()
        async with asyncio.timeout(20):
            await asyncio.get_running_loop().shutdown_default_executor()


class SlowOperations:
    """An engine that takes its time, and notes the memory that it was to read when it is done."""

    def __init__(self) -> None:
        self.go, self.found = asyncio.Event(), list[bytes]()

    async def operate(self, ask: Operate) -> bytes:
        await self.go.wait()
        self.found.append(Path(json.loads(ask.text or "")["directory"]).read_bytes())
        return msgspec.json.encode(WeightsState(version="1", number=1, digest="", paused=False))


async def test_a_client_that_leaves_ends_no_update_and_its_memory_stays_until_then() -> None:
    engine = SlowOperations()
    weights = EngineWeights(engine)  # type: ignore[arg-type]
    memory = write_tensors({}, {"a": "b"})
    content = os.pread(memory, 100, 0)
    client = asyncio.create_task(weights.do(UpdateWeights(directory=""), memory))
    await asyncio.sleep(0)
    client.cancel()
    await asyncio.wait([client])
    waiting = [asyncio.create_task(weights.do(Describe())) for _ in range(MOST_ASKED)]
    await asyncio.wait(waiting[-1:])
    with pytest.raises(RequestError, match="under way"):
        await waiting[-1]
    for one in waiting:
        one.cancel()
    engine.go.set()
    while not engine.found:
        await asyncio.sleep(0)
    assert engine.found == [content]
    await asyncio.sleep(0.01)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(memory)
