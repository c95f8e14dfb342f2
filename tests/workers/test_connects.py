"""Where a server and its executor connect to: nowhere but to themselves, from start to end, by any library."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.figures import Figure
from tests.workers.server import Server, stream_all

SOURCE = Path(__file__).with_name("watch_connects.c")


@pytest.mark.slow
@pytest.mark.reliability("P15", "every connect() of the server and its executor watched, in the C library")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("link", ["unix", "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
def test_the_server_connects_to_nobody(tmp_path: Path, link: str, figure: Figure) -> None:
    watch, seen = tmp_path / "watch.so", tmp_path / "connects"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(watch), str(SOURCE), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(watch), "CONNECTS": str(seen)}
    with Server(f"placement.link={link}", "placement.ingress=process", env=environment) as server:
        assert stream_all(server, 2, max_tokens=20).done == 2
        assert server.end(signal.SIGTERM)[0] == 0
    probe = "import socket; s = socket.socket(); s.settimeout(0.1); s.connect(('192.0.2.1', 9))"
    subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, check=False)
    *lines, last = seen.read_text().splitlines()
    assert last == "2 192.0.2.1 9", "the watch works"
    elsewhere = [line for line in lines if line.split()[1] not in ("127.0.0.1", "::1")]
    figure("connects to elsewhere", len(elsewhere), at_most=0)
    assert bool(lines) == (link != "unix"), "only links over TCP have executor and frontend connect, to this machine"


@pytest.mark.reliability("P15", "connect() of all tests patched to refuse other machines")
def test_a_test_cannot_connect_elsewhere() -> None:
    with socket.socket() as one, pytest.raises(AssertionError, match="a test connects to"):
        one.connect(("198.51.100.1", 80))
    with socket.socket() as one, pytest.raises(AssertionError, match="a test connects to"):
        one.connect_ex(("198.51.100.1", 80))
    with socket.socket() as listener, socket.socket() as one:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        one.connect(listener.getsockname())
