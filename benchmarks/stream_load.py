"""Many clients that stream at once, in one thread that does as little as possible.

Owns: the sockets and what is counted.  Does not know: what the events say.
"""

import json
import selectors
import socket
import time
from dataclasses import dataclass

EVENT_END = b"\n\n"
BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadResult:
    """num_events: of all streams, without the closing one of each.  seconds: from the first event to the last.
    num_bytes: everything that arrived.  cpu_s: that this thread took."""

    num_events: int
    seconds: float
    num_bytes: int
    cpu_s: float

    @property
    def events_per_s(self) -> float:
        return self.num_events / self.seconds


def completion_request(model: str, max_tokens: int, prompt: list[int] | str, **fields: object) -> bytes:
    """A streaming request of exactly so many tokens, on a connection of its own.  fields: what else it says."""
    fields = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **fields}
    body = json.dumps(fields | {"temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def run_load(port: int, requests: list[bytes], timeout_s: float = 120.0) -> LoadResult:
    """Send every request on its own connection, and read until the server closes them all."""
    selector = selectors.EpollSelector()
    for request in requests:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ, _Reader(client))
    num_open, num_events, num_bytes = len(requests), 0, 0
    first = last = time.perf_counter()
    started, cpu = first, time.thread_time()
    while num_open:
        if time.perf_counter() - started > timeout_s:
            raise TimeoutError(f"{num_open} of {len(requests)} streams are still open after {timeout_s} s")
        for key, _ in selector.select(1.0):
            data = key.data.read()
            if not data:
                num_open -= 1
                selector.unregister(key.fileobj)
                key.data.socket.close()
                continue
            count = key.data.events_in(data)
            if count and not num_events:
                first = time.perf_counter()
            num_events += count
            num_bytes += len(data)
            last = time.perf_counter()
    selector.close()
    return LoadResult(num_events - len(requests), last - first, num_bytes, time.thread_time() - cpu)


class _Reader:
    """One connection."""

    __slots__ = ("_half", "socket")

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self._half = False

    def read(self) -> bytes:
        try:
            return self.socket.recv(BUFFER_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionResetError:
            return b""

    def events_in(self, data: bytes) -> int:
        """An event's end may be cut in two."""
        count = data.count(EVENT_END) + (self._half and data[:1] == b"\n")
        self._half = data[-1:] == b"\n" and data[-2:] != EVENT_END
        return count
