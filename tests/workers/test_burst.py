"""Bodies that end in the same moment, each of which opens and cancels many requests: the server holds them back."""

import json
import os
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.pace import far
from tests.server.http_client import RawClient, http_bytes
from tests.workers.server import MODEL, QUICK, Server
from tests.workers.test_frontends import ask, fetch

NUM_SOCKETS = 200
PLACEMENTS = {
    "inline": ("placement.executor=inline",),
    "all": ("placement.executor=process", "placement.tokenizers=2", "placement.ingress=process"),
}
WRONG_AT_LAST = {"prompt": [*([at] for at in range(127)), [1 << 30]], "max_tokens": 1}
MANY_CHOICES = {"prompt": "def f(", "n": 100, "max_tokens": 2}
MOST_CHOICES = {"model": MODEL, "prompt": "x", "n": 128, "max_tokens": 1}


def all_at_once(server: Server, body: dict[str, Any]) -> Counter[int]:
    """Statuses of as many requests, whose last bytes are sent together."""
    port = int(server.url.rpartition(":")[2])
    data = http_bytes("POST", "/v1/completions", json.dumps({"model": MODEL, **body}).encode())
    clients = [RawClient(port, timeout_s=120.0) for _ in range(NUM_SOCKETS)]
    try:
        for client in clients:
            client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.send(data[:-1])
        os.killpg(server.process.pid, signal.SIGSTOP)  # so that it finds all of them when it looks
        for client in clients:
            client.send(data[-1:])
        os.killpg(server.process.pid, signal.SIGCONT)
        with ThreadPoolExecutor(16) as pool:
            return Counter(reply.status for reply in pool.map(lambda client: client.read_reply(), clients))
    finally:
        for client in clients:
            client.socket.close()


def wait_for_room(server: Server) -> None:
    """Until as many requests as the limit allows are accepted: cancelled ones count until the engine drops them."""
    deadline = time.monotonic() + far(12)
    with ThreadPoolExecutor(4) as pool:  # 4 x 128 choices: limits.max_requests is 512
        while True:
            replies = list(pool.map(lambda _: fetch(server, "/v1/completions", MOST_CHOICES), range(4)))
            if all(status == 200 for status, _ in replies):
                assert all(len(json.loads(body)["choices"]) == 128 for _, body in replies)
                return
            assert {status for status, _ in replies} <= {200, 429}, replies
            assert time.monotonic() < deadline, "requests are left that nobody has"
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_burst_of_bodies_with_many_requests_is_answered_and_leaves_nothing(placement: str) -> None:
    with Server(*PLACEMENTS[placement], launcher=QUICK) as server:
        for _ in range(2):
            assert set(all_at_once(server, WRONG_AT_LAST)) <= {400, 429}
        wait_for_room(server)
        statuses = all_at_once(server, MANY_CHOICES)
        assert set(statuses) <= {200, 429}
        assert statuses[200] > 0
        wait_for_room(server)
        assert ask(server, "/load")["server_load"] == 0
        stats = ask(server, "/stats")
        assert (stats["restarts"], stats["tokenizer_restarts"], stats["front_restarts"]) == (0, 0, 0)
        assert all(box["peak"] <= box["capacity"] for box in stats["mailboxes"])
        assert "ERROR" not in server.logged()
