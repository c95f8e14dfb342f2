"""A client that sends exactly the bytes that it is given, and one-shot requests on top of it."""

import json
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from server.local_token import make_token
from tests.pace import far


class Reply(NamedTuple):
    """A response; ``body`` is unchunked."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The stream's events, decoded; "[DONE]" stays as it is."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") for event in events), events
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


class RawClient:
    """One connection."""

    def __init__(self, port: int, *, receive_buffer: int | None = None, timeout_s: float = 10.0) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(far(timeout_s))
        self.socket.connect(("127.0.0.1", port))
        self._buffer = b""

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._fill()
        head, mark, self._buffer = self._buffer.partition(mark)
        return head + mark

    def read_exactly(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            self._fill()
        data, self._buffer = self._buffer[:num_bytes], self._buffer[num_bytes:]
        return data

    def unread(self, data: bytes) -> None:
        """Put what was read back, in front of what was not."""
        self._buffer = data + self._buffer

    def read_reply(self) -> Reply:
        head = self.read_until(b"\r\n\r\n").decode("latin-1")
        status_line, *lines = head.rstrip().split("\r\n")
        status = int(status_line.split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if status == 100:
            return self.read_reply()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.read_until(b"\r\n"), 16):
                body += self.read_exactly(size)
                self.read_until(b"\r\n")
            self.read_until(b"\r\n")
        else:
            body = self.read_exactly(int(headers.get("content-length", 0)))
        return Reply(status, headers, body)

    def seconds_until_closed(self) -> float:
        """Read and drop until the server closes or resets the connection."""
        started = time.monotonic()
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return time.monotonic() - started

    def _fill(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError(f"closed after {self._buffer!r}")
        self._buffer += data


def http_bytes(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """A whole request."""
    all_headers = {"Host": "test", "Content-Type": "application/json", "Content-Length": str(len(body))}
    all_headers.update(headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def as_operator() -> dict[str, str]:
    """Returns the header that opens the operators' routes of a server without keys; skips where there is no token."""
    if not (token := make_token()):
        pytest.skip("no folder of this user can be written, so operators have no token")
    return {"Authorization": f"Bearer {token}"}


def ask(port: int, method: str, path: str, body: Any = b"", headers: Mapping[str, str] | None = None) -> Reply:
    """One request on a connection of its own, with the local token unless it brings a key.

    A body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = dict(headers or {})
    if not {"Authorization", "X-Api-Key"} & given.keys():
        given |= as_operator()
    with RawClient(port) as client:
        client.send(http_bytes(method, path, data, {"Connection": "close", **given}))
        return client.read_reply()
