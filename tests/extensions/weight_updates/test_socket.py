"""Weights by a Unix socket: memory itself is passed, whole or as a delta, and what is wrong changes nothing."""

import os
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file

from callboard.weights import send_delta, send_weights
from engine.types.errors import WeightsError
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
