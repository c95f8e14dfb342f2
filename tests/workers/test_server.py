"""The whole server with its executor in a process of its own: killed, hung, drained, interrupted, and badly placed."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.figures import Figure
from tests.pace import far
from tests.workers.executors import alive, children, held, send, within
from tests.workers.server import DEMO, QUICK, REAL, Client, Server, run_cli, shared_memory, stream_all

INGRESS = ["inline", "process"]


@pytest.fixture(scope="module", params=INGRESS)
def server(request: pytest.FixtureRequest) -> object:
    overrides = (f"placement.ingress={request.param}", "placement.silence_timeout_s=1.5", "placement.max_restarts=20")
    with Server(*overrides, launcher=REAL if request.param == "inline" else QUICK) as server:
        yield server
        code, logged = server.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in logged


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """The texts of 32 undisturbed streams."""
    client = stream_all(server, 32)
    assert client.done == 32
    assert set(client.reasons) == {"length"}
    return client.texts


@pytest.mark.slow
@pytest.mark.reliability("P1", "SIGKILL of the executor under 32 streams")
def test_a_killed_executor_costs_thirty_two_streams_nothing_but_time(
    server: Server, expected: list[str], figure: Figure
) -> None:
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        send(signal.SIGKILL, server.process.pid)
        killed_at = time.monotonic()
        within(2, lambda: server.get("/ready")[0] == 503)
        status, body = server.get("/health")
        assert (status, body["status"]) == (200, "recovering")
        within(30, server.ready)
        figure("ready again", time.monotonic() - killed_at, "s", at_most=10, patience=3)

    client = stream_all(server, 32, kill)
    figure("every stream has ended", time.monotonic() - killed_at, "s", at_most=5, patience=10)
    figure("streams as they would have been", sum(map(str.__eq__, client.texts, expected)), at_least=32)
    assert client.texts == expected
    assert (client.done, client.errors) == (32, [None] * 32)
    assert stream_all(server, 32).texts == expected
    assert server.get("/stats")[1]["pages"]["used"] == 0


@pytest.mark.reliability("P3", "SIGSTOP of the executor under 32 streams, watchdog 1.5 s")
def test_a_hung_executor_shows_and_is_replaced(server: Server, expected: list[str], figure: Figure) -> None:
    victims = []

    def stop() -> None:
        victims.append(send(signal.SIGSTOP, server.process.pid))
        figure("/ready is 503", within(10, lambda: server.get("/ready")[0] == 503), "s", at_most=3.5, patience=3)
        figure("ready again", within(30, server.ready), "s", at_most=10, patience=3)

    client = stream_all(server, 32, stop)
    figure("streams as they would have been", sum(map(str.__eq__, client.texts, expected)), at_least=32)
    assert client.texts == expected
    assert not alive(victims[0])


@pytest.mark.slow
@pytest.mark.reliability("P6", "SIGTERM under 50 streams")
@pytest.mark.parametrize("ingress", INGRESS)
def test_sigterm_under_fifty_streams_lets_them_end_and_takes_no_more(figure: Figure, ingress: str) -> None:
    with Server(f"placement.ingress={ingress}", f"server.drain_timeout_s={far(30):g}", launcher=QUICK) as server:

        def terminate() -> None:
            os.killpg(server.process.pid, signal.SIGHUP)  # a terminal that closes cuts no stream
            server.process.send_signal(signal.SIGTERM)
            took_s = within(5, lambda: server.get("/ready")[0] == 503, every_s=0.001)
            figure("/ready is 503", took_s, "s", at_most=0.1, patience=20)
            refused = stream_all(server, 1)
            assert refused.errors[0] is not None
            assert refused.errors[0]["error"]["code"] == "draining"
            assert server.get("/health")[1]["status"] == "draining"

        def hold_and_terminate() -> None:
            with held(server.process.pid):  # it would be gone once the streams have ended
                terminate()

        client = stream_all(server, 50, hold_and_terminate)
        figure("streams that ended whole", client.reasons.count("length"), at_least=50)
        assert client.done == 50
        code, logged = server.end()
        assert (code, "Traceback" in logged) == (0, False)


@pytest.mark.reliability("P7", "SIGINT twice under streams; SIGTERM while it loads")
@pytest.mark.parametrize("when", ["serving", "loading"])
def test_a_second_sigint_ends_everything_at_once(when: str, figure: Figure) -> None:
    with Server(wait=when == "serving") as server:
        if when == "serving":

            def interrupt() -> None:
                server.process.send_signal(signal.SIGINT)
                within(5, lambda: server.get("/ready")[0] == 503)
                os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does it
                started = time.monotonic()
                server.process.wait(far(10))
                figure("the process has ended", time.monotonic() - started, "s", at_most=1, patience=5)

            with pytest.raises(Exception, match=r"payload|closed|reset|disconnected"):
                stream_all(server, 4, interrupt, max_tokens=1500)
            expected_code = 130
        else:
            within(20, lambda: bool(children(server.process.pid)))
            os.killpg(server.process.pid, signal.SIGTERM)
            started = time.monotonic()
            server.process.wait(far(20))
            figure("the process has ended", time.monotonic() - started, "s", at_most=1, patience=10)
            expected_code = 0
        code, logged = server.end(timeout_s=8)
        assert (code, "Traceback" in logged) == (expected_code, False), logged
        within(2, lambda: not server.group())


@pytest.mark.slow
@pytest.mark.reliability("P5", "SIGKILL of the server, serving and loading")
@pytest.mark.parametrize("when", ["serving", "loading"])
async def test_nothing_survives_a_killed_server(when: str, figure: Figure) -> None:
    """No process of its group, no socket, no shared memory."""
    with Server(wait=False) as server:
        within(20, lambda: bool(children(server.process.pid)))
        (executor,) = children(server.process.pid)
        mapped: set[str] = set()
        if when == "serving":
            server.url = server._read_url()
            client = Client(server.url, 4, 1500)
            running = asyncio.ensure_future(client.run())
            while not client.begun:
                await asyncio.sleep(0.002)
            mapped.update(shared_memory(server.group()))
            server.process.kill()
            await asyncio.wait((running,))
            running.exception()
        else:
            within(20, lambda: not os.listdir(server.sockets))  # connected: it is loading now
            server.process.kill()
        server.process.wait()
        figure("no child is alive", within(10, lambda: not alive(executor)), "s", at_most=2, patience=3)
        assert server.group() == []
    assert not [name for name in mapped if os.path.exists(name)]
    if when == "serving":
        with socket.socket() as again:  # the port is free at once
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))


@pytest.mark.slow
@pytest.mark.reliability("P4", "the executor killed every 2 s, two restarts allowed")
def test_an_executor_that_cannot_live_ends_the_server_with_one_line(figure: Figure) -> None:
    with Server("placement.max_restarts=2", launcher=QUICK) as server:
        started = next_at = time.monotonic()
        while server.process.poll() is None:
            if time.monotonic() >= next_at and (found := children(server.process.pid)):
                os.kill(found[0], signal.SIGKILL)  # also while it loads
                next_at += 2
            time.sleep(0.02)
            assert time.monotonic() - started < far(60)
        figure("the server has ended", time.monotonic() - started, "s", at_most=15, patience=4)
        code, logged = server.end()
        assert code == 1
        assert logged.strip().splitlines()[-1] == (
            "callboard: executor0 was killed by SIGKILL; 2 restarts in 300 s did not help"
        )
        assert "Traceback" not in logged


@pytest.mark.reliability("P8", "a place for sockets that is missing, a symlink, open to others, not writable, not ours")
@pytest.mark.parametrize(
    ("how", "said"),
    [("missing", "No such file"), ("symlink", "symbolic link"), ("mode", "mode 0755"), ("tcp", "cannot listen on")],
    ids=["missing", "symlink", "mode", "tcp"],
)
def test_a_place_for_sockets_that_will_not_do_is_one_line_before_anything_is_loaded(
    tmp_path: Path, how: str, said: str, figure: Figure
) -> None:
    place = tmp_path / "sockets"
    if how == "symlink":
        place.symlink_to(tmp_path)
    elif how == "mode":
        place.mkdir()
        place.chmod(0o755)
    link = "tcp://192.0.2.1:5000" if how == "tcp" else f"unix:{place}"
    sections = ["--set", "placement.executor=process", "--set", f"placement.link={link}"]
    started = time.monotonic()
    ended = run_cli("serve", str(DEMO), "--port", "0", *sections)
    figure("from the command to its end", time.monotonic() - started, "s", at_most=1, patience=20)
    assert ended.returncode == (1 if how == "tcp" else 2), ended.stderr
    complaint = ended.stderr.strip().splitlines()[-1]
    assert complaint.startswith("callboard: ")
    assert said in complaint
    assert "rank 0 ready" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.reliability("P8", "a port that is in use")
def test_a_port_in_use_is_one_line_before_anything_is_loaded(figure: Figure) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = time.monotonic()
        ended = run_cli("serve", str(DEMO), "--port", str(taken.getsockname()[1]))
    figure("from the command to its end", time.monotonic() - started, "s", at_most=1, patience=20)
    assert ended.returncode == 98
    assert "is in use; stop the process that listens there" in ended.stderr
    assert ended.stderr.count("\n") == 1
