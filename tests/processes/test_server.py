"""The whole server with its executor in a process of its own: killed, hung, drained, interrupted, and badly placed."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes.executors import alive, children, send, within
from tests.processes.server import DEMO, Client, Server, run_cli, shared_memory

TOKENS = 250


def stream_all(server: Server, count: int, during: object = None, max_tokens: int = TOKENS) -> Client:
    """Run streams to their end; ``during`` is called on a thread once all of them have begun."""
    client = Client(server.url, count, max_tokens)

    async def main() -> None:
        running = asyncio.ensure_future(client.run())
        if during is not None:
            async with asyncio.timeout(30):
                while not client.begun:
                    assert not any(client.errors), client.errors
                    await asyncio.sleep(0.002)
            await asyncio.to_thread(during)  # type: ignore[arg-type]
        await asyncio.wait_for(running, 60)

    asyncio.run(main())
    return client


@pytest.fixture(scope="module")
def server() -> object:
    with Server("placement.silence_timeout_s=1.5", "placement.max_restarts=20") as server:
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


def test_a_killed_executor_costs_thirty_two_streams_nothing_but_time(server: Server, expected: list[str]) -> None:

    def kill() -> None:
        send(signal.SIGKILL, server.process.pid)
        within(2, lambda: server.get("/ready")[0] == 503)
        status, body = server.get("/health")
        assert (status, body["status"]) == (200, "recovering")
        assert within(10, server.ready) < 10

    client = stream_all(server, 32, kill)
    assert client.texts == expected
    assert (client.done, client.errors) == (32, [None] * 32)
    assert stream_all(server, 32).texts == expected
    assert server.get("/health")[1]["pages"]["used"] == 0


def test_a_hung_executor_shows_and_is_replaced(server: Server, expected: list[str]) -> None:
    victims = []

    def stop() -> None:
        victims.append(send(signal.SIGSTOP, server.process.pid))
        assert within(1.5 + 2, lambda: server.get("/ready")[0] == 503)
        within(10, server.ready)

    client = stream_all(server, 32, stop)
    assert client.texts == expected
    assert not alive(victims[0])


def test_sigterm_under_fifty_streams_lets_them_end_and_takes_no_more() -> None:
    with Server() as server:
        took = []

        def terminate() -> None:
            server.process.send_signal(signal.SIGTERM)
            took.append(within(5, lambda: server.get("/ready")[0] == 503))
            refused = stream_all(server, 1)
            assert refused.errors[0] is not None
            assert refused.errors[0]["error"]["code"] == "draining"
            assert server.get("/health")[1]["status"] == "draining"

        client = stream_all(server, 50, terminate)
        assert (client.done, set(client.reasons)) == (50, {"length"})
        assert took[0] < 1.0
        code, logged = server.end()
        assert (code, "Traceback" in logged) == (0, False)


@pytest.mark.parametrize("when", ["serving", "loading"])
def test_a_second_sigint_ends_everything_at_once(when: str) -> None:
    with Server(wait=when == "serving") as server:
        if when == "serving":

            def interrupt() -> None:
                server.process.send_signal(signal.SIGINT)
                within(5, lambda: server.get("/ready")[0] == 503)
                os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does it
                started = time.monotonic()
                server.process.wait(5)
                assert time.monotonic() - started < 1

            with pytest.raises(Exception, match=r"payload|closed|reset|disconnected"):
                stream_all(server, 4, interrupt, max_tokens=1500)
            expected_code = 130
        else:
            within(20, lambda: bool(children(server.process.pid)))
            os.killpg(server.process.pid, signal.SIGTERM)
            started = time.monotonic()
            server.process.wait(10)
            assert time.monotonic() - started < 2
            expected_code = 0
        code, logged = server.end(timeout_s=8)
        assert (code, "Traceback" in logged) == (expected_code, False), logged
        within(2, lambda: not server.group())


@pytest.mark.parametrize("when", ["serving", "loading"])
def test_nothing_survives_a_killed_server(when: str) -> None:
    """No process of its group, no socket, no shared memory."""
    with Server(wait=False) as server:
        within(20, lambda: bool(children(server.process.pid)))
        (executor,) = children(server.process.pid)
        mapped: set[str] = set()
        if when == "serving":
            server.url = server._read_url()
            client = Client(server.url, 4, 1500)

            async def vanish() -> None:
                running = asyncio.ensure_future(client.run())
                while not client.begun:
                    await asyncio.sleep(0.002)
                mapped.update(shared_memory(server.group()))
                server.process.kill()
                await asyncio.wait((running,))
                running.exception()

            asyncio.run(vanish())
        else:
            within(20, lambda: not os.listdir(server.sockets))  # connected: it is loading now
            server.process.kill()
        server.process.wait()
        assert within(2, lambda: not alive(executor)) < 2
        assert server.group() == []
    assert not [name for name in mapped if os.path.exists(name)]
    if when == "serving":
        with socket.socket() as again:  # the port is free at once
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_an_executor_that_cannot_live_ends_the_server_with_one_line() -> None:
    with Server("placement.max_restarts=2") as server:
        started = time.monotonic()
        while server.process.poll() is None:
            for pid in children(server.process.pid):
                os.kill(pid, signal.SIGKILL)
                within(5, lambda: not alive(pid))  # noqa: B023
            time.sleep(0.02)
            assert time.monotonic() - started < 40
        code, logged = server.end()
        assert code == 1
        # The two later ones are killed while they load.
        assert logged.strip().splitlines()[-1] == (
            "callboard: executor0 was killed by SIGKILL; 2 restarts in 300 s did not help"
        )
        assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("how", "said"),
    [("missing", "No such file"), ("symlink", "symbolic link"), ("mode", "mode 0755"), ("tcp", "cannot listen on")],
)
def test_a_place_for_sockets_that_will_not_do_is_one_line_before_anything_is_loaded(
    tmp_path: Path, how: str, said: str
) -> None:
    place = tmp_path / "sockets"
    if how == "symlink":
        place.symlink_to(tmp_path)
    elif how == "mode":
        place.mkdir()
        place.chmod(0o755)
    link = "tcp://192.0.2.1:5000" if how == "tcp" else f"unix:{place}"
    sections = ["--set", "placement.executor=process", "--set", f"placement.link={link}"]
    ended = run_cli("serve", str(DEMO), "--port", "0", *sections)
    assert ended.returncode == (1 if how == "tcp" else 2), ended.stderr
    complaint = ended.stderr.strip().splitlines()[-1]
    assert complaint.startswith("callboard: ")
    assert said in complaint
    assert "rank 0 ready" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("stderr", ["closed", "/dev/full"])
def test_a_server_that_cannot_log_still_serves(stderr: str) -> None:
    if stderr == "closed":
        options = {"stderr": None, "preexec_fn": lambda: os.close(2)}
    else:
        options = {"stderr": open("/dev/full", "w")}  # noqa: SIM115
    with Server(**options) as server:
        if stderr != "closed":
            options["stderr"].close()
        assert stream_all(server, 2, max_tokens=20).done == 2
        send(signal.SIGKILL, server.process.pid)
        within(2, lambda: not server.ready())
        within(20, server.ready)
        assert stream_all(server, 2, max_tokens=20).done == 2
        used = time_used(server.process.pid)
        time.sleep(0.5)
        assert time_used(server.process.pid) - used < 0.1 + 0.5 * 0.2, "it spins"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_a_server_short_of_descriptors_serves_or_refuses_and_does_not_spin() -> None:
    limit = 64

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    with Server(preexec_fn=limited) as server:
        port = int(server.url.rpartition(":")[2])
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * limit)]
        used = time_used(server.process.pid)
        time.sleep(0.5)
        spent = time_used(server.process.pid) - used
        for one in crowd:
            one.close()
        within(10, server.ready)
        assert stream_all(server, 2, max_tokens=20).done == 2
        assert spent < 0.1 + 0.5 * 0.2, f"{spent} s of CPU time in half a second without work"
        assert server.end(signal.SIGTERM)[0] == 0


def time_used(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_server_connects_to_nobody(tmp_path: Path) -> None:
    """Neither the server nor its executor, from start to end."""
    seen = tmp_path / "connects"
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "connect = socket.socket.connect\n"
        "def watched(self, address):\n"
        "    if self.family != socket.AF_UNIX and address[0] not in ('127.0.0.1', '::1', 'localhost'):\n"
        f"        open({str(seen)!r}, 'a').write(f'{{address}}\\n')\n"
        "    return connect(self, address)\n"
        "socket.socket.connect = socket.socket.connect_ex = watched\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with Server(env=environment) as server:
        assert stream_all(server, 2, max_tokens=20).done == 2
        assert server.end(signal.SIGTERM)[0] == 0
    probe = "import socket; socket.socket().connect(('192.0.2.1', 9))"
    subprocess.run(["timeout", "1", "python3", "-c", probe], env=environment, capture_output=True, check=False)
    assert seen.read_text().splitlines() == ["('192.0.2.1', 9)"], "the watch works, and saw nothing else"
