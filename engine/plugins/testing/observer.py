"""The conformance kit for observers: one call checks an observer, and lists every case that fails.

    from callboard.plugins.testing import check_observer
    check_observer(lambda: RequestLines(path))

Owns: random requests and events, in orders in which an engine may send them.  Does not know: torch, an observer's
reactions.
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
END_S = 5.0  # time for an observer's threads to end after it is stopped


def check_observer(make: Callable[[], object]) -> None:
    """Call new observers like an engine.  Raises ConformanceError with all that fails.

    make: builds a new one each time, as ``callboard_observer`` does; for a module without that hook, returns it."""
    findings = Findings("observer")
    findings.timed("hooks", lambda: _Called(make()).check_hooks())
    if findings.failures:
        findings.conclude()
    findings.timed("requests", lambda: _send(make(), (FINISHED,)))
    findings.timed("events", lambda: _send(make(), (EVENT,)))
    findings.timed("both, in any order", lambda: _send(make(), (FINISHED, EVENT)))
    findings.timed("an engine that stops at once", lambda: _Called(make()).stop())
    findings.timed("memory", lambda: _check_memory(_Called(make())))
    if not findings.failures:  # not on a thread of its own, whose threads would be daemons too
        with findings.case("threads"):
            _check_threads(make)
    findings.conclude()


class _Called:
    """An observer called through pluggy, as in the engine."""

    def __init__(self, observer: object) -> None:
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(observer, "observer")
        manager.check_pending()
        impls = {name: getattr(manager.hook, name).get_hookimpls() for name in (FINISHED, EVENT, STOPPED)}
        self._hooks = {name: at_once(impl.function, name) for name, of in impls.items() for impl in of}
        self._arguments = {name: impl.argnames for name, of in impls.items() for impl in of}

    def check_hooks(self) -> None:
        """Check that hooks are plain functions, and that at least one observes something."""
        assert self._hooks.keys() & {FINISHED, EVENT}, (
            f"it observes nothing; it must implement {FINISHED} or {EVENT}, and mark it @hookimpl"
        )
        for name, call in self._hooks.items():
            assert not inspect.iscoroutinefunction(inspect.unwrap(call)), f"{name} is async; hooks are plain functions"

    def finished(self, requests: list[RequestMetrics]) -> None:
        """Report some ended requests."""
        self._call(FINISHED, "requests", requests)

    def events(self, events: list[KVEvent]) -> None:
        """Report changes of some pages."""
        self._call(EVENT, "events", events)

    def stop(self) -> None:
        """Report the end of the engine."""
        if STOPPED in self._hooks:
            self._hooks[STOPPED]()

    def _call(self, hook: str, argument: str, batch: list[Any]) -> None:
        if hook in self._hooks:
            before = list(batch)
            self._hooks[hook](*[batch] * (argument in self._arguments[hook]))
            assert batch == before, f"{hook} has changed its batch, which other observers get too"


def _send(observer: object, hooks: Sequence[str]) -> None:
    called, rng = _Called(observer), np.random.default_rng(0)
    try:
        for number in range(NUM_BATCHES):
            size = int(rng.integers(1, MOST_OF_A_BATCH))
            if rng.choice(list(hooks)) == FINISHED:
                called.finished([_request(number * MOST_OF_A_BATCH + index) for index in range(size)])
            else:
                called.events([_event(number * MOST_OF_A_BATCH + index) for index in range(size)])
    finally:
        called.stop()


def _request(number: int) -> RequestMetrics:
    """Return a request with one of all ways to end; some never began, or had no or one token."""
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
    """Return an event of one of all kinds, including one of a later version."""
    kind: Any = ("stored", "removed", "restored", "of a later version")[number % 4]
    names = tuple(bytes([number % 256, index]) * 16 for index in range(1 + number % 3))
    tokens = b"" if kind == "removed" else bytes(64 * len(names))
    return KVEvent(kind, "host" if number % 3 else "device", Namespace("", ""), bytes(32), names, tokens)


def _check_memory(called: _Called) -> None:
    def send(number: int) -> None:
        called.finished([_request(number)])
        called.events([_event(number)])

    try:
        watch_memory(send, "a request and an event")
    finally:
        called.stop()


def _check_threads(make: Callable[[], object]) -> None:
    """Check that an observer's threads end with it, as they would keep the process alive."""
    before = set(threading.enumerate())
    _send(make(), (FINISHED, EVENT))
    started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in started:
        thread.join(END_S / len(started))
    left = [thread.name for thread in started if thread.is_alive()]
    assert not left, f"after {STOPPED} its threads continue: {', '.join(left)}"
