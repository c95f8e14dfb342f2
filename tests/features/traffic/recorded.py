"""A planner with a device of known step times, in virtual time, whose traffic is recorded.

Owns: what such an engine says to a recorder, and when.  Does not know: what traces are for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.simulation import Request, Simulation, tokens
from engine.config import Config, build_config
from engine.features.traffic.recorder import TraceRecorder
from engine.features.traffic.trace import Trace, read_trace
from engine.messages import Admit, Step, StepDone
from engine.scheduling.rows import PlannerLimits

MAX_RUNNING, NUM_PAGES = 32, 2000
PREFIX = 96


def requests(count: int, per_s: float, seed: int = 0) -> list[Request]:
    """Return requests of four tenants, with prefixes that some share.  Half of them end by EOS."""
    rng = np.random.default_rng(seed)
    prefixes = [tokens(rng, PREFIX) for _ in range(12)]
    made = []
    for at in np.cumsum(rng.exponential(1 / per_s, count)):
        prompt = np.concatenate((prefixes[int(rng.integers(12))], tokens(rng, int(rng.integers(1, 300)))))
        output = int(rng.integers(2, 150))
        by_itself = rng.random() < 0.5
        ends_at, most = (output, 256) if by_itself else (1 << 20, output)
        made.append(Request(float(at), prompt.astype(np.int32), ends_at, most, f"tenant {rng.integers(4)}"))
    return made


class Recorded(Simulation):
    """A ``Simulation`` that a recorder listens to.  Steps sample what each request's tokens are, by its number."""

    def __init__(
        self, made: list[Request], recorder: TraceRecorder | None = None, policy: str = "priority", **limits: Any
    ):
        super().__init__(made, policy, **limits)
        self._recorder = recorder
        self._links: list[Any] = [recorder.tap(_Nowhere())] if recorder is not None else []
        complete, admit = self.planner.complete, self.planner.admit

        def completed(done: StepDone) -> None:
            self._note(done)
            complete(done)
            for message in self.planner.outbox:
                self._note(message)
            self.finished += self.planner.finished
            if self.planner.finished and recorder is not None:
                recorder.callboard_request_finished(tuple(self.planner.finished))

        def admitted(message: Admit) -> None:
            self._note(message)
            admit(message)

        self.planner.complete, self.planner.admit = completed, admitted  # type: ignore[method-assign]
        self.finished: list[Any] = []

    def _note(self, message: object) -> None:
        for link in self._links:
            link.put(message)

    def _seconds(self, step: Step) -> float:
        self._note(step)
        return super()._seconds(step)


class _Nowhere:
    def put(self, message: object) -> None:
        pass


def recorder_in(
    folder: Path, clock: Any, *, trace_mb: int = 100, **tables: dict[str, Any]
) -> tuple[TraceRecorder, Config]:
    """One with the settings of ``Recorded``."""
    scheduler = {"max_running": MAX_RUNNING, "max_step_tokens": 2048, "prefill_chunk": 512}
    given = {"scheduler": scheduler, "storage": {"folder": str(folder), "trace_mb": trace_mb}, **tables}
    config = build_config(Config(), given)
    return TraceRecorder(config.storage, "tested/model", clock), config


def limits_of(simulation: Simulation) -> PlannerLimits:
    """Return the limits of its planner."""
    return simulation.planner.requests.limits


def record(folder: Path, made: Sequence[Request], **limits: Any) -> tuple[Trace, Recorded]:
    """A trace of these requests, and the engine that was recorded."""
    clock: list[Simulation] = []
    recorder, config = recorder_in(folder, lambda: clock[0].playback.now)
    sizes = {"max_running": MAX_RUNNING, "num_pages": NUM_PAGES, **limits}
    simulation = Recorded(list(made), recorder, **sizes)
    clock.append(simulation)
    recorder.begin(limits_of(simulation), config)
    simulation.run()
    recorder.close()
    (path,) = (folder / "traces").iterdir()
    return read_trace(path), simulation


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what a trace has on each line."""
    return [msgspec.json.decode(text) for text in path.read_bytes().splitlines()]
