"""A whole engine whose device computes nothing, and whose every row samples the same token.

Owns: that device.  Does not know: who asks.  What is left to measure is everything around the device.
A device that needs no time would be steps ahead of the event loop, and tokens would merge before anybody could write
them.  So a step is done when the loop has come round often enough to have written what the step before it brought.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.actors.actor import Actor, Link
from engine.actors.runner import Runner
from engine.config import Config
from engine.control.engine_spec import EngineSpec
from engine.control.system import System
from engine.messages import Deltas, Step, StepDone, StepExtras
from engine.types.logprobs import Logprobs
from engine.workers.executors import GenerationSettings
from engine.workers.frontend import FrontendCommand
from engine.workers.tokenizers import TokenizerPool

INT32_BYTES = 4
# Scheduler, tokenizer, ingress and handler are a turn each; two more for a drain and a write.
LOOP_TURNS = 6
PATIENCE_S = 5.0  # for text that never comes, of a request that was cut off


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that was done when it was launched."""

    result: StepDone

    def ready(self) -> bool:
        return True

    def collect(self) -> StepDone:
        return self.result


class Turns:
    """Waits, in another thread, until an event loop has come round a number of times."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._loop = loop
        self._count = count
        self._over = threading.Event()

    def wait(self) -> None:
        """Until everything that was ready when this began, and what that led to, has been done."""
        self._over.clear()
        self._loop.call_soon_threadsafe(self._turn, self._count)
        self._over.wait()

    def _turn(self, left: int) -> None:
        if left:
            self._loop.call_soon(self._turn, left - 1)
        else:
            self._over.set()


class Delivery:
    """The link from a tokenizer pool to ingress, which another thread may wait for: text is made in other processes, so
    the loop's turns alone do not say how far it is."""

    def __init__(self, ingress: Link[Any]) -> None:
        self._ingress = ingress
        self._num_due = 0
        self._moved = threading.Condition()

    def put(self, message: Any) -> None:
        """Pass it on, and count."""
        self._ingress.put(message)
        if isinstance(message, Deltas):
            with self._moved:
                self._num_due -= len(message.deltas)
                self._moved.notify()

    def sampled(self, count: int) -> None:
        """So many tokens more; waits until those before them are there."""
        with self._moved:
            self._moved.wait_for(lambda: self._num_due <= 0, timeout=PATIENCE_S)
            self._num_due += count


class NullRunner(Runner):
    """token: what every row samples.  turns: what a step waits for, after ``step_s`` asleep, and ``delivery`` too.
    num_logprobs: alternatives whose log probabilities every token comes with; 0 for no log probabilities."""

    def __init__(
        self,
        num_pages: int,
        token: int,
        turns: Turns,
        step_s: float,
        delivery: Delivery | None = None,
        num_logprobs: int = 0,
    ) -> None:
        self.num_pages = num_pages
        tops = np.arange(300, 300 + num_logprobs, dtype=np.int32)
        self._logprobs = Logprobs(
            logprob=-1.0, top_ids=tops.tobytes(), top_logprobs=np.full(num_logprobs, -3.0, dtype=np.float32).tobytes()
        )
        self._has_logprobs = num_logprobs > 0
        self._token = token
        self._turns = turns
        self._step_s = step_s
        self._delivery = delivery

    def launch(self, step: Step) -> _Done:
        if self._step_s:
            time.sleep(self._step_s)
        self._turns.wait()
        samples = np.frombuffer(step.prefill_samples, dtype=np.int32)
        count = len(step.decode_rows) // INT32_BYTES + int(samples.sum())
        if self._delivery is not None:
            self._delivery.sampled(count)
        tokens = np.full(count, self._token, dtype=np.int32)
        extras: dict[int, StepExtras] = {}
        if self._has_logprobs:
            prefilled = np.frombuffer(step.prefill_rows, dtype=np.int32)[samples == 1]
            rows = np.concatenate((np.frombuffer(step.decode_rows, dtype=np.int32), prefilled))
            extras = dict.fromkeys(rows.tolist(), StepExtras(logprobs=self._logprobs))
        return _Done(StepDone(rank=0, step_id=step.step_id, token_ids=tokens.tobytes(), extras=extras))

    def leave(self) -> None:
        """There are no other ranks."""


class NullSystem(System):
    """``System`` on such a device.  The checkpoint's tokenizer and shape are the real ones."""

    def __init__(
        self,
        config: Config,
        *,
        text: str = " return",
        step_s: float = 0.0,
        num_logprobs: int = 0,
        frontend: FrontendCommand | None = None,
    ) -> None:
        super().__init__(config, frontend=frontend)
        self._token = int(self.codec.encode(text)[-1])
        self._step_s = step_s
        self._num_logprobs = num_logprobs
        self._delivery: Delivery | None = None

    async def start(self) -> None:
        """As a system does."""
        self._loop = asyncio.get_running_loop()
        if isinstance(self.tokenizer, TokenizerPool):
            self._delivery = Delivery(self.ingress.inbox)
            self.tokenizer.connect(scheduler=self.scheduler.inbox, ingress=self._delivery)
        await super().start()

    def _load_runner(self, engine: EngineSpec, rank: int, terms: GenerationSettings, *_: Any) -> Runner:
        turns = Turns(self._loop, LOOP_TURNS)
        num_pages = terms.num_pages or engine.config.kv.num_pages
        return NullRunner(num_pages, self._token, turns, self._step_s, self._delivery, self._num_logprobs)


class Stopwatch:
    """CPU seconds of the event loop's thread that each actor's handling takes."""

    def __init__(self, actors: list[Actor[Any]]) -> None:
        self.seconds = {actor.name: 0.0 for actor in actors}
        for actor in actors:
            actor._take = self._timed(actor.name, actor._take)  # type: ignore[method-assign]

    def _timed(self, name: str, take: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        def timed(messages: list[Any]) -> None:
            started = time.thread_time()
            take(messages)
            self.seconds[name] += time.thread_time() - started

        return timed
