"""A whole engine whose device does a step when it is told to, and clients that count in such steps.

Owns: the gate before the device, the clients that have asked and not been answered.  Does not know: what is measured.
Nothing here waits for a time, so what is counted does not depend on what else the machine does.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.null_engine import NullSystem
from engine.actors.runner import PendingStep, Runner
from engine.config import Config
from engine.messages import Step
from tests.server.http_client import RawClient, Reply, http_bytes
from tests.server.live_system import MODEL, LiveSystem

PATIENCE_S = 30.0  # for anything that ought to happen at once


class Gate:
    """Lets one step through each time it is opened.  ``blocked``: a step stands before it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_let_in = 0
        self._is_open = False
        self.blocked = False

    def enter(self) -> None:
        """Called by the device: wait to be let in."""
        with self._changed:
            self.blocked = not (self._is_open or self._num_let_in)
            self._changed.wait_for(lambda: self._is_open or self._num_let_in)
            self.blocked = False
            self._num_let_in -= not self._is_open

    def let_in(self) -> None:
        """One step that stands there."""
        with self._changed:
            self.blocked = False
            self._num_let_in += 1
            self._changed.notify_all()

    def open(self) -> None:
        """From now on nobody waits."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class _GatedRunner(Runner):
    """A device behind a gate."""

    def __init__(self, inner: Runner, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self.num_pages = inner.num_pages

    def launch(self, step: Step) -> PendingStep:
        """See ``Runner``."""
        self._gate.enter()
        return self._inner.launch(step)

    def leave(self) -> None:
        """See ``Runner``."""
        self._inner.leave()


class PacedSystem(NullSystem):
    """``NullSystem`` behind a gate."""

    def __init__(self, gate: Gate, config: Config) -> None:
        super().__init__(config)
        self._gate = gate

    def _load_runner(self, *arguments: Any) -> Runner:
        return _GatedRunner(super()._load_runner(*arguments), self._gate)


class Asked:
    """One request on a connection of its own.  at_step, at: when it was sent, in steps and in seconds."""

    def __init__(self, port: int, body: bytes, at_step: int) -> None:
        self._client = RawClient(port, timeout_s=PATIENCE_S)
        self._client.send(http_bytes("POST", "/v1/completions", body, {"Connection": "close"}))
        self._client.socket.setblocking(False)
        self.at_step = at_step
        self.at = time.perf_counter()
        self.num_steps = 0
        self.seconds = 0.0
        self.reply: Reply | None = None

    def look(self, step: int) -> bool:
        """Whether there is a reply, at this step."""
        try:
            self._client._fill()
        except BlockingIOError:
            return False
        self._client.socket.setblocking(True)
        with self._client:
            self.reply = self._client.read_reply()
        self.seconds, self.num_steps = time.perf_counter() - self.at, step - self.at_step
        return True


class PacedClients:
    """Everybody who has asked ``live``, whose steps go by when ``tick`` says so.  step_s: at most so often; 0 for as
    often as can be."""

    def __init__(self, live: LiveSystem, gate: Gate, step_s: float = 0.0) -> None:
        self._live = live
        self._gate = gate
        self._step_s = step_s
        self._due = time.perf_counter()
        self.step = 0
        self.waiting: list[Asked] = []
        self.served: list[Asked] = []
        self.refused: list[Asked] = []

    def ask(self, num_requests: int, prompt: list[int], max_tokens: int) -> None:
        """So many more, each of which the engine has taken or refused on return."""
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps(fields).encode()
        self.waiting += [Asked(self._live.port, body, self.step) for _ in range(num_requests)]
        self._until(lambda: len(self.waiting) == self._live.gauges().num_open)

    def tick(self) -> None:
        """Let one step through, and see who has been answered when the next one is ready or there is none."""
        if self.waiting:
            self._until(lambda: self._gate.blocked)
            if (early_s := self._due - time.perf_counter()) > 0:
                time.sleep(early_s)
            self._due = max(self._due, time.perf_counter() - self._step_s) + self._step_s
            self._gate.let_in()
            self._until(lambda: self._gate.blocked or not self._live.gauges().num_open)
            self._until(lambda: len(self.waiting) == self._live.gauges().num_open)
        self.step += 1

    def _until(self, condition: Callable[[], bool]) -> None:
        latest = time.perf_counter() + PATIENCE_S
        while True:
            self._look()
            if condition():
                return
            assert time.perf_counter() < latest, f"{len(self.waiting)} wait, {self._live.gauges()}"

    def _look(self) -> None:
        for one in [one for one in self.waiting if one.look(self.step)]:
            self.waiting.remove(one)
            assert one.reply is not None
            (self.served if one.reply.status == 200 else self.refused).append(one)
