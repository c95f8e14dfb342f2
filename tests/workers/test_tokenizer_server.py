"""The whole server with tokenizers in processes of their own: killed, killed again and again, drained, orphaned."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.figures import Figure
from tests.pace import far
from tests.workers.executors import alive, children, held, within
from tests.workers.server import QUICK, Client, Server

pytestmark = pytest.mark.slow

TOKENS = 250
LOST = "tokenizer_lost"


def tokenizers(server: Server) -> list[int]:
    return children(server.process.pid, "tokenizer")


async def stream_all(server: Server, count: int) -> Client:
    """Run streams to their end."""
    client = Client(server.url, count, TOKENS)
    await play(client)
    return client


async def play(client: Client, during: Callable[[], None] | None = None) -> None:
    """Run streams to their end; ``during`` is called on a thread once all of them have begun."""
    running = asyncio.ensure_future(client.run())
    if during is not None:
        async with asyncio.timeout(far(30)):
            while not client.begun:
                await asyncio.sleep(0.002)
        await asyncio.to_thread(during)
    await asyncio.wait_for(running, far(60))


def was_seen_recovering(server: Server, victim: int) -> bool:
    """Whether the server has said so before its next tokenizer was there."""
    latest = time.monotonic() + far(5)
    while server.get("/health")[1]["status"] != "recovering":
        if any(one != victim for one in tokenizers(server)) and server.ready():
            return False
        assert time.monotonic() < latest
    return True


@pytest.mark.reliability("P2", "SIGKILL of a tokenizer under 32 streams, of one and of two tokenizers")
@pytest.mark.parametrize("count", [1, 2])
async def test_a_killed_tokenizer_ends_its_streams_with_an_error_and_the_server_is_soon_ready_again(
    count: int, figure: Figure
) -> None:
    with Server(
        "kv.num_pages=1024",
        f"placement.tokenizers={count}",
        "placement.executor=inline",
        "placement.max_restarts=9",
        launcher=QUICK,
    ) as server:
        expected = (await stream_all(server, 32)).texts
        struck: list[float] = []
        took = []
        client = Client(server.url, 32, TOKENS)

        def kill() -> None:
            for _ in range(5):  # the next one is there within a second, in which who looks may not run
                victim = tokenizers(server)[0]
                struck.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)
                if is_seen := count > 1 or was_seen_recovering(server, victim):
                    break
            assert is_seen
            within(5, lambda: any(client.errors))
            figure("its streams end", time.monotonic() - struck[0], "s", at_most=5, patience=3)
            within(30, lambda: len(tokenizers(server)) == count)
            within(30, server.ready)
            took.append(time.monotonic() - struck[-1])

        await play(client, kill)
        lost = [index for index, error in enumerate(client.errors) if error is not None]
        assert 1 <= len(lost) <= 32 // count, "only its own, and those of them that still ran"
        for index in lost:
            error = client.errors[index]["error"]  # type: ignore[index]
            assert (error["code"], error["type"]) == (LOST, "service_unavailable")
            assert expected[index].startswith(client.texts[index]), "what came before is right"
        assert [text for index, text in enumerate(client.texts) if index not in lost] == [
            text for index, text in enumerate(expected) if index not in lost
        ]
        figure("ready again", took[0], "s", at_most=10, patience=3)
        within(10, lambda: server.get("/stats")[1]["tokenizers"] == count)
        stats = server.get("/stats")[1]
        assert stats["tokenizer_restarts"] == len(struck)
        assert [box["name"] for box in stats["mailboxes"]][-count:] == [f"tokenizer{one}" for one in range(count)]
        again = await stream_all(server, 32)
        assert (again.texts, again.errors) == (expected, [None] * 32)
        assert server.get("/stats")[1]["pages"]["used"] == 0
        code, logged = server.end(signal.SIGTERM)
        assert (code, "Traceback" in logged) == (0, False), logged
        assert "tokenizer0 was killed by SIGKILL; it is restarted (1 so far)" in logged


def test_a_tokenizer_that_cannot_live_ends_the_server_with_one_line() -> None:
    overrides = ("placement.tokenizers=1", "placement.executor=inline", "placement.max_restarts=2")
    with Server(*overrides, launcher=QUICK) as server:
        started = time.monotonic()
        while server.process.poll() is None:
            for pid in tokenizers(server):
                os.kill(pid, signal.SIGKILL)
                within(5, lambda: not alive(pid))  # noqa: B023
            time.sleep(0.02)
            assert time.monotonic() - started < far(40)
        code, logged = server.end()
        assert code == 1
        assert logged.strip().splitlines()[-1] == (
            "callboard: tokenizer0 was killed by SIGKILL; 2 restarts in 300 s did not help"
        )
        assert "Traceback" not in logged


@pytest.mark.parametrize("ingress", ["inline", "process"])
async def test_sigterm_lets_streams_end_with_executors_and_tokenizers_in_processes(ingress: str) -> None:
    with Server("placement.tokenizers=2", f"placement.ingress={ingress}", launcher=QUICK) as server:

        def terminate() -> None:
            with held(server.process.pid):  # it would be gone once the streams have ended
                server.process.send_signal(signal.SIGTERM)
                within(5, lambda: server.get("/ready")[0] == 503)

        client = Client(server.url, 20, TOKENS)
        await play(client, terminate)
        assert (client.done, set(client.reasons)) == (20, {"length"})
        code, logged = server.end()
        assert (code, "Traceback" in logged) == (0, False), logged


@pytest.mark.parametrize("when", ["serving", "loading"])
def test_no_tokenizer_survives_a_killed_server(when: str) -> None:
    ways = {"wait": True, "launcher": QUICK} if when == "serving" else {"wait": False}
    with Server("placement.tokenizers=2", "placement.executor=inline", **ways) as server:
        within(20, lambda: len(tokenizers(server)) == 2)
        pids = tokenizers(server)
        if when == "loading":
            within(20, lambda: not os.listdir(server.sockets))  # connected: they are loading now
        server.process.kill()
        server.process.wait()
        within(2, lambda: not any(map(alive, pids)))
        assert server.group() == []
