"""The conformance kit for observers: one call proves one right, or lists every case in which it is not.

    from callboard.plugins.testing import check_observer
    check_observer(lambda: RequestLines(path))

Owns: random requests and events, in the orders in which an engine may tell of them.  Does not know: torch, what an
observer does with them.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pluggy

from engine.kv.events import KVEvent
from engine.kv.node import Namespace
from engine.messages import Finish
from engine.plugins import hookspecs
from engine.plugins.proof.findings import Findings
from engine.plugins.testing.promises import at_once, watch_memory
from engine.scheduling.meter import RequestMetrics

FINISHED, EVENT, STOPPED = "callboard_request_finished", "callboard_kv_event", "callboard_engine_stopped"
NUM_BATCHES = 60
MOST_OF_A_BATCH = 5
END_S = 5.0  # for threads of an observer that has been told to stop


def check_observer(make: Callable[[], object]) -> None:
    """Tell new observers what an engine would.  Raises ConformanceError with all that fails.

    make: builds a new one each time, as ``callboard_observer`` does; of a module without that hook, returns it."""
    findings = Findings("observer")
    findings.timed("hooks", lambda: _Told(make()).check_hooks())
    if findings.failures:
        findings.conclude()
    findings.timed("requests", lambda: _tell(make(), (FINISHED,)))
    findings.timed("events", lambda: _tell(make(), (EVENT,)))
    findings.timed("both, in any order", lambda: _tell(make(), (FINISHED, EVENT)))
    findings.timed("an engine that stops at once", lambda: _Told(make()).stop())
    findings.timed("memory", lambda: _check_memory(_Told(make())))
    if not findings.failures:  # not on a thread of its own, whose threads would be daemons too
        with findings.case("threads"):
            _check_threads(make)
    findings.conclude()


class _Told:
    """An observer behind pluggy, as the engine has it."""

    def __init__(self, observer: object) -> None:
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(observer, "observer")
        manager.check_pending()
        impls = {name: getattr(manager.hook, name).get_hookimpls() for name in (FINISHED, EVENT, STOPPED)}
        self._hooks = {name: at_once(impl.function, name) for name, of in impls.items() for impl in of}
        self._arguments = {name: impl.argnames for name, of in impls.items() for impl in of}

    def check_hooks(self) -> None:
        """Plain functions, of which one at least tells something."""
        assert self._hooks.keys() & {FINISHED, EVENT}, (
            f"it observes nothing; it must implement {FINISHED} or {EVENT}, and mark it @hookimpl"
        )
        for name, call in self._hooks.items():
            assert not inspect.iscoroutinefunction(inspect.unwrap(call)), f"{name} is async; hooks are plain functions"

    def finished(self, requests: list[RequestMetrics]) -> None:
        """Some requests have ended."""
        self._tell(FINISHED, "requests", requests)

    def events(self, events: list[KVEvent]) -> None:
        """Something happened to some pages."""
        self._tell(EVENT, "events", events)

    def stop(self) -> None:
        """The engine has ended."""
        if STOPPED in self._hooks:
            self._hooks[STOPPED]()

    def _tell(self, hook: str, argument: str, batch: list[Any]) -> None:
        if hook in self._hooks:
            before = list(batch)
            self._hooks[hook](*[batch] * (argument in self._arguments[hook]))
            assert batch == before, f"{hook} has changed its batch, which other observers get too"


def _tell(observer: object, hooks: Sequence[str]) -> None:
    told, rng = _Told(observer), np.random.default_rng(0)
    try:
        for number in range(NUM_BATCHES):
            size = int(rng.integers(1, MOST_OF_A_BATCH))
            if rng.choice(list(hooks)) == FINISHED:
                told.finished([_request(number * MOST_OF_A_BATCH + index) for index in range(size)])
            else:
                told.events([_event(number * MOST_OF_A_BATCH + index) for index in range(size)])
    finally:
        told.stop()


def _request(number: int) -> RequestMetrics:
    """All ways to end; some never began, or had one token."""
    finish = list(Finish)[1 + number % 4]
    began, had_token = number % 5 > 0, number % 5 > 1
    return RequestMetrics(
        request_id=number,
        finish=finish,
        num_prompt_tokens=1 + number,
        num_output_tokens=number % 7 if had_token else 0,
        cached_tokens=number % 3,
        num_retractions=number % 2,
        arrived_at=float(number),
        queue_s=0.1 if began else None,
        ttft_s=0.2 if had_token else None,
        tpot_s=0.01 if had_token and number % 7 > 1 else None,
        e2e_s=1.0,
        priority=number % 5 - 2,
        client=("", "10.0.0.7", "caf\u00e9 'o'")[number % 3],
        client_request_id=f"req-{number}",
        model="model",
        ended_at_unix_s=1.7e9 + number,
    )


def _event(number: int) -> KVEvent:
    """All kinds, and one that a later version may bring."""
    kind: Any = ("stored", "removed", "restored", "of a later version")[number % 4]
    names = tuple(bytes([number % 256, index]) * 16 for index in range(1 + number % 3))
    tokens = bytes(64 * len(names)) if kind == "stored" else b""
    return KVEvent(kind, "host" if number % 3 else "device", Namespace("", ""), bytes(32), names, tokens)


def _check_memory(told: _Told) -> None:
    def tell(number: int) -> None:
        told.finished([_request(number)])
        told.events([_event(number)])

    try:
        watch_memory(tell, "a request and an event")
    finally:
        told.stop()


def _check_threads(make: Callable[[], object]) -> None:
    """What an observer has started ends with it, or would keep the process alive."""
    before = set(threading.enumerate())
    _tell(make(), (FINISHED, EVENT))
    started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in started:
        thread.join(END_S / len(started))
    left = [thread.name for thread in started if thread.is_alive()]
    assert not left, f"after {STOPPED} its threads go on: {', '.join(left)}"
