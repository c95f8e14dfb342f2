"""Clients of every kind, good and bad, each of which goes on until it is told to stop.

Owns: what they do, how often they have, what went wrong that must not.  Does not know: how long, what is read then.
"""

import itertools
import json
import random
import socket
import struct
import time
from collections import Counter
from contextlib import ExitStack, suppress

from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.test_malformed import BROKEN_BODIES, MODEL, NOT_HTTP, cases

KINDS = (
    "streams",
    "leaves",
    "stops reading",
    "sends slowly",
    "resets",
    "crowds in",
    "asks nonsense",
    "is idle",
    "pipes",
)
PROMPTS = [f"def function_{number}(a, b):\n" for number in range(12)]
BUSY = (429, 503)  # what may be said to anybody
PAUSE_S = 0.02


def completion(prompt: str, max_tokens: int, stream: bool = True) -> bytes:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return http_bytes("POST", "/v1/completions", json.dumps({**fields, "stream": stream}).encode())


class Misuse:
    """Of the server at ``port``.  counts: of each kind's requests or connections; faults: what must never be."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._dice = random.Random(11)
        self._texts: dict[str, str] = {}
        # Made for a vocabulary of a thousand tokens; in a larger one, some of them are sound and answered at length.
        nonsense = [(path, body) for path, _, body in cases() if b"1000" not in body]
        nonsense += [("/v1/completions", body) for body in BROKEN_BODIES.values()]
        self._nonsense = itertools.cycle(self._dice.sample(nonsense, len(nonsense)))
        self._not_http = itertools.cycle(NOT_HTTP.values())
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def go_on(self, kind: str, until: float) -> None:
        """Be such a client, again and again."""
        act = getattr(self, f"_{kind.replace(' ', '_')}")
        while time.monotonic() < until:
            try:
                self.counts[kind] += act()
            except (AssertionError, OSError) as error:
                self.faults.append(f"{kind}: {error!r}")
            time.sleep(PAUSE_S)

    # ---- each returns how many requests it made ---------------------------------------------

    def _streams(self) -> int:
        prompt = self._dice.choice(PROMPTS)
        with self._connect() as client:
            client.send(completion(prompt, 24))
            reply = client.read_reply()
        if reply.status in BUSY:
            return 1
        assert reply.events[-1] == "[DONE]", reply.events[-1]
        text = "".join(event["choices"][0]["text"] for event in reply.events[:-1])
        assert text == self._texts.setdefault(prompt, text), "another text than before"
        return 1

    def _leaves(self) -> int:
        with self._connect() as client:
            client.send(completion(self._dice.choice(PROMPTS), 400, stream=self._dice.random() < 0.7))
            client.socket.settimeout(self._dice.random() * 0.1)
            with suppress(TimeoutError):
                client.read_until(b"data: ")
        return 1

    def _stops_reading(self) -> int:
        with ExitStack() as stack:
            clients = [stack.enter_context(self._connect(receive_buffer=4096)) for _ in range(4)]
            for client in clients:
                client.send(completion("for all of them ", 1200))
            time.sleep(1.5)
        return len(clients)

    def _sends_slowly(self) -> int:
        request = completion("x", 4)
        with ExitStack() as stack:
            clients = [stack.enter_context(self._connect()) for _ in range(10)]
            for number, client in enumerate(clients):
                client.send(request[: 30 if number % 2 else -5])
            for client in clients:
                assert client.read_reply().status in (408, *BUSY)
        return len(clients)

    def _resets(self) -> int:
        for number in range(6):
            client = self._connect()
            client.send(completion("gone ", 200)[: (None, 50, -3)[number % 3]])
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.socket.close()
        return 6

    def _crowds_in(self) -> int:
        with ExitStack() as stack:
            clients = [stack.enter_context(self._connect()) for _ in range(48)]
            for client in clients:
                client.send(completion("one of many ", 8))
            for client in clients:
                assert client.read_reply().status in (200, *BUSY)
        return len(clients)

    def _asks_nonsense(self) -> int:
        path, body = next(self._nonsense)
        status = ask(self._port, "POST", path, body).status
        assert status < 500 or status in BUSY, (path, body[:200], status)
        with self._connect() as client:
            client.send(next(self._not_http))
            status = client.read_reply().status
            assert 400 <= status < 500, status
        return 2

    def _is_idle(self) -> int:
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(self._connect())
            time.sleep(1.3)
        return 100

    def _pipes(self) -> int:
        with self._connect() as client:
            client.send(completion("piped ", 2, stream=False) * 20)
            for _ in range(20):
                assert client.read_reply().status in (200, *BUSY)
        return 20

    def _connect(self, receive_buffer: int | None = None) -> RawClient:
        return RawClient(self._port, receive_buffer=receive_buffer, timeout_s=30)
