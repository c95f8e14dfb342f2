"""More requests than can be served: those that are taken finish in time, the others are told at once.

Counted in steps of the device, which come one by one as the test wants them, so that nothing depends on how busy the
machine is: a queue that grows, rows that stay empty and requests that wait too long are the same on any machine.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from engine.config import Config, build_config
from tests.figures import Figure
from tests.server.live_system import MODEL, LiveSystem
from tests.server.paced_system import Asked, Gate, PacedClients, PacedSystem

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
ROWS = 8
TOKENS = 10
PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class Load:
    """What a number of steps has brought.  loop_s: CPU seconds of the event loop's thread."""

    num_steps: int
    seconds: float
    loop_s: float
    served: list[Asked]
    refused: list[Asked]

    @property
    def goodput(self) -> float:
        """Requests served in a step."""
        return len(self.served) / self.num_steps

    def per_second(self) -> float:
        """The same by the clock."""
        return len(self.served) / self.seconds

    def p99(self) -> float:
        """Of those that were served, in steps."""
        return statistics.quantiles((one.num_steps for one in self.served), n=100, method="inclusive")[98]

    def p99_s(self) -> float:
        """The same in seconds."""
        return statistics.quantiles((one.seconds for one in self.served), n=100, method="inclusive")[98]


def together(loads: list[Load]) -> Load:
    """Several as one."""
    return Load(
        num_steps=sum(load.num_steps for load in loads),
        seconds=sum(load.seconds for load in loads),
        loop_s=sum(load.loop_s for load in loads),
        served=[one for load in loads for one in load.served],
        refused=[one for load in loads for one in load.refused],
    )


def offer(live: LiveSystem, clients: PacedClients, num_steps: int, arrivals: float, most_waiting: int = 10**6) -> Load:
    """So many more requests in each step, on average, and only until so many wait."""
    num_served, num_refused = len(clients.served), len(clients.refused)
    started, loop_s, owed = time.perf_counter(), live.call(time.thread_time), 0.0
    for _ in range(num_steps):
        owed += arrivals
        clients.ask(min(int(owed), most_waiting - len(clients.waiting)), PROMPT, TOKENS)
        owed %= 1
        clients.tick()
    seconds, loop_s = time.perf_counter() - started, live.call(time.thread_time) - loop_s
    served, refused = clients.served[num_served:], clients.refused[num_refused:]
    while clients.waiting:
        clients.tick()
    return Load(num_steps, seconds, loop_s, served, refused)


@pytest.mark.slow
@pytest.mark.reliability("H7", "twice as many requests as can be served, for 3,000 steps of 10 ms")
def test_twice_the_load_costs_no_goodput_and_little_patience(figure: Figure, at_full_size: bool) -> None:
    tables = {
        "model": {"path": str(DEMO), "name": MODEL},
        "kv": {"num_pages": 1024},
        "scheduler": {"max_running": ROWS},
        "limits": {"max_requests": 2 * ROWS},
    }
    num_turns, step_s = (10, 0.01) if at_full_size else (1, 0.0)
    gate = Gate()
    turns: list[tuple[Load, Load, Load]] = []
    with LiveSystem(build_config(Config(), tables), partial(PacedSystem, gate)) as live:
        try:
            clients = PacedClients(live, gate, step_s)
            for _ in range(num_turns):  # whatever else the machine does then does it to all three
                alone = offer(live, clients, 100, arrivals=1, most_waiting=1)
                peak = offer(live, clients, 100, arrivals=2 * ROWS, most_waiting=2 * ROWS)
                turns.append((alone, peak, offer(live, clients, 300, arrivals=2 * peak.goodput)))
        finally:
            gate.open()
    alone, peak, beyond = (together(list(loads)) for loads in zip(*turns, strict=True))
    assert not peak.refused
    assert peak.goodput >= 0.8 * ROWS / TOKENS, "not every row was used"
    assert len(beyond.refused) >= 0.4 * (len(beyond.refused) + len(beyond.served))
    for one in beyond.refused:
        assert one.reply is not None
        assert (one.reply.status, one.reply.error["code"]) == (429, "queue_full")
        assert int(one.reply.headers["retry-after"]) >= 1
        assert one.num_steps == 0, "a refusal waited for the device"
    figure("goodput of peak, by steps", beyond.goodput / peak.goodput, at_least=0.9)
    figure("p99 of the accepted, in steps, of unloaded", beyond.p99() / alone.p99(), at_most=3)
    figure("slowest refusal", max(one.seconds for one in beyond.refused), "s", at_most=2, patience=1)
    # What a refusal takes from those that are served: the loop's time, of which each step has its share.
    cost_s = (beyond.loop_s - peak.loop_s * len(beyond.served) / len(peak.served)) / len(beyond.refused)
    figure("event loop, per refusal", cost_s * 1e3, "ms", at_most=2, patience=2)
    if at_full_size:  # the middle turn of ten, since others may have had the processor in some
        goodputs = [beyond.per_second() / peak.per_second() for _, peak, beyond in turns]
        figure("goodput of peak, by the clock", statistics.median(goodputs), at_least=0.9, patience=1.5)
        slower = [beyond.p99_s() / alone.p99_s() for alone, _, beyond in turns]
        figure("p99 of the accepted, by the clock, of unloaded", statistics.median(slower), at_most=3, patience=3)
