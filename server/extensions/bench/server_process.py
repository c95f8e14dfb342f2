"""A server as a process of its own on a free port, from its start until it is ended.

Owns: the port, the wait until it is ready, its processor time.  Does not know: which server it is.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from engine.types.errors import CallboardError

READY_S = 600.0
LOOK_S = 5.0  # that one look at a server may take
LAST_BYTES = 400  # of what a server that did not come up has printed
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
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen([*command, str(port)], stdin=nothing, stdout=nothing, stderr=errors)
            self.pid = self._process.pid
            if self._comes_up(route):
                return
            self.close()
            errors.seek(0)
            printed = errors.read()[-LAST_BYTES:].decode(errors="replace").strip()
        raise CallboardError(f"a server did not come up: {' '.join(command)} {port}: {printed}")

    def _comes_up(self, route: str) -> bool:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urlopen(f"{self.url}{route}", timeout=LOOK_S) as answer:  # noqa: S310 - http, of this machine
                    if answer.status == 200:
                        return True
            except (OSError, HTTPException):
                time.sleep(0.05)
        return False

    def cpu_s(self) -> float:
        """Return the processor time until now of the process and of those that it has started."""
        return sum(sum(map(int, fields[11:15])) for fields in self._tree()) / TICKS

    def _tree(self) -> Iterator[list[str]]:
        """Yield what /proc says of the process and of all below it, behind the name of each."""
        processes: dict[int, list[str]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                processes[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
        below = {self.pid}
        while more := {pid for pid, fields in processes.items() if int(fields[1]) in below} - below:
            below |= more
        yield from (processes[pid] for pid in below if pid in processes)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
