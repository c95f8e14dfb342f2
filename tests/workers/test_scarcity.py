"""A server short of descriptors or of a place to log: it serves or refuses, recovers, and does not spin."""

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.figures import Figure
from tests.pace import far
from tests.workers.executors import send, within
from tests.workers.server import QUICK, Server, stream_all

pytestmark = pytest.mark.slow

WATCHED_S = 1.0


def share_of_a_core(pid: int) -> float:
    """CPU time over a while in which there is nothing to do; a figure of a few ticks, whatever else is running."""
    before = time_used(pid)
    began = time.monotonic()
    time.sleep(WATCHED_S)
    return (time_used(pid) - before) / (time.monotonic() - began)


def time_used(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def closed(number: int) -> Callable[[], None]:
    return lambda: os.close(number)


def full(number: int) -> Callable[[], None]:
    """A disk without room."""
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), number) and None  # type: ignore[func-returns-value]


@pytest.mark.reliability("P12", "standard error closed, or on a full disk; the executor killed as well")
@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("stderr", ["closed", "full"])
def test_a_server_that_cannot_log_still_serves(stderr: str, log_format: str, figure: Figure) -> None:
    spoil = closed(2) if stderr == "closed" else full(2)
    options: dict[str, Any] = {"stderr": None, "preexec_fn": spoil, "arguments": ("--log-format", log_format)}
    if log_format == "json":  # the other one is with torch, which may have something to say as well
        options["launcher"] = QUICK
    with Server(**options) as server:
        assert (json.loads(server.greeting)["url"] == server.url) if log_format == "json" else "try:" in server.greeting
        assert stream_all(server, 2, max_tokens=20).done == 2
        send(signal.SIGKILL, server.process.pid)
        within(2, lambda: not server.ready())
        within(30, server.ready)
        assert stream_all(server, 2, max_tokens=20).done == 2
        figure("of a core, idle", 100 * share_of_a_core(server.process.pid), "%", at_most=20)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(far(20)) == 0


@pytest.mark.reliability("P12", "64 descriptors and 128 connections")
def test_a_server_short_of_descriptors_serves_or_refuses_and_does_not_spin(figure: Figure) -> None:
    limit = 64

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    with Server(preexec_fn=limited, launcher=QUICK) as server:
        port = int(server.url.rpartition(":")[2])
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * limit)]
        share = share_of_a_core(server.process.pid)
        for one in crowd:
            one.close()
        within(10, server.ready)
        assert stream_all(server, 2, max_tokens=20).done == 2
        figure("of a core, under the crowd", 100 * share, "%", at_most=20, patience=1.5)
        assert server.end(signal.SIGTERM)[0] == 0
