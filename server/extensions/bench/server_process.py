"""A server as a process of its own on a free port, from its start until it is ended.

Owns: the port, the wait until it is ready, its processor time.  Does not know: which server it is.
"""

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from engine.types.errors import CallboardError

READY_S = 600.0
TICKS = os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """A server that is ready when this returns.  Raises CallboardError if it ends before.

    command: gets the port as its last argument.  route: answers with 200 when it is ready."""

    def __init__(self, command: Sequence[str], route: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen([*command, str(port)], stdin=nothing, stdout=nothing, stderr=nothing)
        self.pid = self._process.pid
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urlopen(f"{self.url}{route}") as answer:  # noqa: S310 - http, of this machine
                    if answer.status == 200:
                        return
            except (URLError, ConnectionError):
                time.sleep(0.05)
        self.close()
        raise CallboardError(f"a server did not come up: {' '.join(command)} {port}")

    def cpu_s(self) -> float:
        """Return the processor time of the process until now, of all its threads and of children that have ended."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
