"""What an engine shows of itself while it works, idles, hangs and recovers."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.null_engine import NullRunner, NullSystem, Turns
from engine.config import Config, build_config
from engine.control.system import System
from engine.plugins.hookspecs import hookimpl
from engine.scheduling.meter import RequestMetrics
from engine.types.params import SamplingParams
from tests.pace import far

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class HangingSystem(NullSystem):
    """Its device stops in the middle of a step until ``go_on`` is set."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.go_on = threading.Event()
        self.go_on.set()

    def _load_runner(self, *rest: Any) -> Any:
        system = self

        class Hanging(NullRunner):
            def launch(self, step: Any) -> Any:
                system.go_on.wait()
                return super().launch(step)

        return Hanging(64, 7, Turns(self._loop, 2), 0.0)


def configured() -> Config:
    return build_config(Config(), {"model": {"path": str(DEMO)}, "kv": {"num_pages": 64}})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(far(5)):
        while not condition():
            await asyncio.sleep(0.005)


async def test_gauges_meter_and_outline_are_those_of_the_engine() -> None:
    system = NullSystem(configured())
    monitor = system.monitor
    assert (monitor.meter, monitor.gauges().num_open, monitor.board().outline.nodes) == (None, 0, ())
    await system.start()
    streams = [system.ingress.open(list(range(10, 60)), GREEDY) for _ in range(3)]
    await streams[0].next()
    busy = monitor.gauges()
    assert (busy.num_open, busy.num_running + busy.num_waiting) == (3, 3)
    assert busy.pages_used > 0
    assert busy.num_in_flight > 0
    await asyncio.gather(*(stream.collect() for stream in streams))
    await until(lambda: monitor.gauges().pages_used == monitor.gauges().num_in_flight == 0)
    idle = monitor.gauges()
    assert (idle.num_open, idle.num_running, idle.pages_used, idle.stalled_s) == (0, 0, 0, 0.0)
    assert idle.pages_free + idle.pages_cached == 64
    meter = monitor.meter
    assert meter is not None
    assert (meter.num_output_tokens, meter.num_prompt_tokens) == (3 * 40, 3 * 50)
    assert sum(node.num_pages for node in monitor.board().outline.nodes) == idle.pages_cached
    assert [box.name for box in idle.mailboxes] == ["ingress", "tokenizer", "scheduler", "executors"]
    assert all(box.peak >= 1 for box in idle.mailboxes[:3])
    assert monitor.decode([10, 11]) == system.codec.decode([10, 11])
    await system.stop()


async def test_a_device_that_hangs_shows_and_one_that_only_waits_for_work_does_not() -> None:
    system = HangingSystem(configured())
    await system.start()
    monitor = system.monitor
    await system.ingress.open([1, 2, 3], GREEDY).collect()
    await until(lambda: monitor.gauges().num_in_flight == 0)
    await asyncio.sleep(0.1)
    assert monitor.gauges().stalled_s == 0.0
    system.go_on.clear()
    opened_at = time.monotonic()
    stream = system.ingress.open([1, 2, 3], GREEDY)
    await until(lambda: monitor.gauges().stalled_s > 0.05)
    # Since the request came, not since the step before it.
    assert monitor.gauges().stalled_s <= time.monotonic() - opened_at
    before = monitor.gauges().stalled_s
    await until(lambda: monitor.gauges().stalled_s > before)
    system.go_on.set()
    await stream.collect()
    await until(lambda: monitor.gauges().num_in_flight == 0)
    assert monitor.gauges().stalled_s == 0.0
    await system.stop()


async def test_who_watches_is_told_of_ended_requests() -> None:
    seen: list[int] = []

    class Watcher:
        @hookimpl
        def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
            seen.extend(one.num_output_tokens for one in requests)

    system: System = NullSystem(configured())
    system.monitor.watch(Watcher(), "tests.watcher")
    await system.start()
    await system.ingress.open([1, 2, 3], GREEDY).collect()
    await until(lambda: bool(seen))
    await system.stop()
    assert seen == [40]


def test_a_watcher_with_a_hook_that_does_not_exist_is_refused() -> None:
    class Misspelt:
        @hookimpl
        def callboard_request_finishd(self, requests: Sequence[RequestMetrics]) -> None:
            pass

    from engine.types.errors import PluginError

    with pytest.raises(PluginError, match="callboard_request_finishd"):
        NullSystem(configured()).monitor.watch(Misspelt(), "tests.misspelt")
