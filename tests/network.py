"""No test reaches another machine: a pytest plugin that ``tests/conftest.py`` loads.

Owns: ``connect`` of Python's sockets in this process.  What libraries do in C, and the processes that tests start, is
watched in ``tests/workers/test_connects.py``.
"""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

HERE = ("127.", "::1", "localhost", "0.0.0.0")
NOWHERE = "192.0.2."  # never routed; tests of what is not there use it


def is_here(family: int, address: Any) -> bool:
    """Whether an address is of this machine, or of nobody."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = str(address[0])
    return not host or host.startswith((*HERE, NOWHERE))


@pytest.fixture(scope="session", autouse=True)
def no_other_machine() -> Iterator[None]:
    """Raises at the line that tried."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def checked(self: socket.socket, address: Any) -> None:
        assert is_here(self.family, address), f"a test connects to {address}"
        connect(self, address)

    def checked_ex(self: socket.socket, address: Any) -> int:
        assert is_here(self.family, address), f"a test connects to {address}"
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", checked)
        patch.setattr(socket.socket, "connect_ex", checked_ex)
        yield
