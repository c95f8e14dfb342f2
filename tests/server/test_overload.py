"""More requests than can be served: those that are taken finish in time, the others are told at once."""

import statistics
import threading
import time
from functools import partial
from pathlib import Path

from benchmarks.null_engine import NullSystem
from engine.config import Config, build_config
from tests.server.live_system import MODEL, LiveSystem

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
STEP_S = 0.01  # so that capacity does not depend on this machine's
ROWS = 8
TOKENS = 10
SECONDS = 2.0


def offer(live: LiveSystem, num_clients: int) -> tuple[list[float], list[float]]:
    """Closed-loop clients for a while; (seconds of each request that was served, of each that was refused)."""
    served: list[float] = []
    refused: list[float] = []
    until = time.monotonic() + SECONDS

    def client(number: int) -> None:
        while (started := time.monotonic()) < until:
            reply = live.complete([number + 1, 2, 3], max_tokens=TOKENS)
            (served if reply.status == 200 else refused).append(time.monotonic() - started)
            assert reply.status in (200, 429)
            if reply.status == 429:
                time.sleep(0.05)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return served, refused


def test_twice_the_load_costs_no_goodput_and_little_patience() -> None:
    tables = {
        "model": {"path": str(DEMO), "name": MODEL},
        "kv": {"num_pages": 1024},
        "scheduler": {"max_running": ROWS},
        "limits": {"max_requests": 2 * ROWS},
    }
    with LiveSystem(build_config(Config(), tables), partial(NullSystem, step_s=STEP_S)) as live:
        # Other tests take the processor for a while, and then neither load says anything about the other.
        assert any(_holds(live) for _ in range(5))


def _holds(live: LiveSystem) -> bool:
    """Whether goodput and patience stay within bounds: 90 % and three times, on a machine of its own."""
    peak, none_refused = offer(live, ROWS)
    served, refused = offer(live, 4 * ROWS)
    assert not none_refused
    assert refused
    p99 = statistics.quantiles(served, n=100)[98]
    patient = p99 <= 4 * max(statistics.median(peak), TOKENS * STEP_S)
    return len(served) >= 0.8 * len(peak) and patient and max(refused) < 2
