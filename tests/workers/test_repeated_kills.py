"""Executors that are killed again and again under clients that never stop asking: no stream is lost, none differs."""

import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, build_config
from tests.figures import Figure
from tests.pace import far
from tests.server.http_client import RawClient, http_bytes
from tests.server.live_system import MODEL, LiveSystem
from tests.workers.executors import children, send, within

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
NUM_CLIENTS = 16
REQUESTS_EACH = 3
PATIENCE_S = 120.0
KILL_EVERY_S = 5.0


def request(number: int) -> bytes:
    """Greedy, or drawn from few candidates: near ties, which float rounding decides, are rare among those."""
    drawn = {"temperature": 0.8, "top_k": 4, "seed": number} if number % 2 else {"temperature": 0}
    fields: dict[str, Any] = {"model": MODEL, "prompt": f"def function_{number}(value):\n    ", "stream": True, **drawn}
    fields |= {"max_tokens": 80 + 5 * number % 60, "ignore_eos": True}
    return http_bytes("POST", "/v1/completions", json.dumps(fields).encode())


def text_of_stream(live: LiveSystem, number: int) -> str:
    """Raises AssertionError if it does not come to its end."""
    with RawClient(live.port, timeout_s=PATIENCE_S) as client:
        client.send(request(number))
        *events, done = client.read_reply().events
    assert done == "[DONE]"
    assert events[-1]["choices"][0]["finish_reason"] == "length", events[-1]
    return "".join(event["choices"][0]["text"] for event in events)


class Clients:
    """Sixteen that ask one after the other until told to stop."""

    def __init__(self, live: LiveSystem, expected: list[str]) -> None:
        self._live = live
        self._expected = expected
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        self.num_whole = 0
        self.wrong: list[int] = []
        self.lost: list[str] = []
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Each ends with the stream that it is in."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(far(PATIENCE_S))
            assert not thread.is_alive()

    def _ask(self, client: int) -> None:
        numbers = [client + NUM_CLIENTS * turn for turn in range(REQUESTS_EACH)]
        dice = random.Random(client)
        while not self._stopping.is_set():
            number = dice.choice(numbers)
            try:
                text = text_of_stream(self._live, number)
            except (AssertionError, OSError) as error:
                self.lost.append(f"{number}: {error!r}")
                continue
            self.num_whole += 1
            if text != self._expected[number]:
                self.wrong.append(number)


@pytest.mark.reliability("H8", "SIGKILL of the executor every 5 s, for 30 s, under 16 clients that stream")
def test_streams_outlive_an_executor_that_is_killed_again_and_again(figure: Figure, at_full_size: bool) -> None:
    num_kills = 6 if at_full_size else 1
    tables = {
        "model": {"path": str(DEMO), "name": MODEL},
        "kv": {"num_pages": 1024},
        "placement": {"executor": "process", "max_restarts": 100},
    }
    slowest_s = 0.0
    with LiveSystem(build_config(Config(), tables)) as live:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            expected = [*pool.map(partial(text_of_stream, live), range(NUM_CLIENTS * REQUESTS_EACH))]
        clients = Clients(live, expected)
        due = time.monotonic()
        for killed in range(num_kills):
            due += KILL_EVERY_S if at_full_size else 0.3
            within(PATIENCE_S, lambda: time.monotonic() >= due and len(children()) == 1)  # noqa: B023
            within(PATIENCE_S, lambda: live.gauges().num_open > 0)
            send(signal.SIGKILL)
            within(PATIENCE_S, lambda: live.gauges().num_restarts > killed)  # noqa: B023
        within(PATIENCE_S, lambda: not live.gauges().recovering)
        slowest_s = live.call(lambda: live.system.executors.last_recovery_s)
        clients.stop()
        num_restarts = live.gauges().num_restarts
    figure("executors killed", num_restarts, at_least=num_kills)
    assert not clients.lost
    assert not clients.wrong
    figure("streams lost", len(clients.lost), at_most=0)
    figure("streams that differ", len(clients.wrong), at_most=0)
    figure("whole streams", clients.num_whole, at_least=NUM_CLIENTS)
    figure("ready again after the last", slowest_s, "s", at_most=10, patience=6)
    assert not children()
