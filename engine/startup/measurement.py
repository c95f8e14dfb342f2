"""One attention backend measured in one phase: its kernels are compiled first, then steps are timed.

Legend: T new tokens of a step · N query heads · H head size
Owns: how a step is timed, and that only right results count.
Does not know: other backends, limits of time, in which process it runs (``race_process.py``).
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.execution.attention import context_of
from engine.graphs.device import GraphDevice, device_for_graphs
from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    GraphAttentionBuilder,
    is_capturable,
)
from engine.layers.kv_pool import Layout
from engine.plugins.declaration import Phase
from engine.plugins.manager import Plugins
from engine.plugins.proof.attention import NUM_LAYERS, check_steps
from engine.plugins.proof.attention_cases import trial_cases
from engine.plugins.selection import Contender, ask
from engine.startup.trial_steps import TrialLoad, TrialSteps
from engine.types.errors import PluginError

MOST_LAYERS = 16  # in turn, so that keys come from memory and not from a cache, as in a step
WARM_UPS, REPEATS, MEASURED_S = 2, 3, 0.02


@dataclass(frozen=True, slots=True)
class RaceEntry:
    """A contender in one phase, and the heads, pages and device that it is measured on.

    options: options of plugins, per full name, as the user has set them.  spec: its sinks are in host memory."""

    contender: Contender
    phase: Phase
    options: Mapping[str, dict[str, Any]]
    spec: AttentionSpec
    page_size: int
    device: torch.device
    dtype: torch.dtype
    layout: Layout
    kv_dtype: str
    loads: tuple[TrialLoad, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """A planned step.  captured: whether it is a graph.  planned: whether the batch is planned before every run."""

    backend: AttentionBackend
    batch: AttentionBatch
    q_TNH: Tensor
    captured: bool
    planned: bool


class Measurement:
    """The measurement of one entry, on the calling thread and on graphs of its own."""

    def __init__(
        self, entry: RaceEntry, *, graphs: GraphDevice | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._entry = entry
        self._clock = clock
        if entry.device.type == "cuda":
            torch.cuda.set_device(entry.device)
        self._graphs = graphs or device_for_graphs(entry.device)
        self._num_layers = entry.spec.num_layers
        spec = entry.spec.shortened(MOST_LAYERS)
        self._spec = replace(spec, sinks=tuple(one.to(entry.device) for one in spec.sinks))
        self._loads = [one for one in entry.loads if one.phase == entry.phase]
        place = (entry.page_size, entry.device, entry.dtype, entry.layout, entry.kv_dtype)
        self._context = replace(context_of(entry.spec, *place), phases=(entry.phase,))
        plugins = Plugins({}, options=entry.options)
        self._factory = ask(plugins, entry.contender, self._context, "measured").factory

    @torch.inference_mode()
    def compile(self) -> None:
        """Run every step once in few layers, so that compilers are done.  Raises the backend's errors, and
        AssertionError if a result is wrong."""
        entry = self._entry
        small = self._spec.shortened(NUM_LAYERS)
        shape = (entry.page_size, small.head_size, small.window, (entry.phase,), entry.layout, entry.kv_dtype)
        for case in trial_cases(self._context.dtype, *shape):
            check_steps(case, self._factory, small, entry.device)
        steps = self._steps(small)
        backend = self._factory(small, steps.pool)
        for load in steps.loads:
            self._checked(backend, load, steps)
        self._wait()
        del backend, steps
        self._graphs.trim()

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        """Return load -> microseconds of all layers.  Raises as ``compile`` does, and PluginError if no step fits."""
        steps = self._steps(self._spec)
        backend = self._factory(self._spec, steps.pool)
        us = {str(load): self._time(backend, load, steps) for load in steps.loads}
        self._wait()
        if not us:
            raise PluginError("there is no memory for a step to measure it with")
        del backend, steps
        gc.collect()
        self._graphs.trim()  # the next phase's pool is as large as there is free memory for
        return us

    def _steps(self, spec: AttentionSpec) -> TrialSteps:
        entry = self._entry
        return TrialSteps(spec, entry.page_size, entry.device, entry.dtype, self._loads, entry.layout, entry.kv_dtype)

    def _checked(self, backend: AttentionBackend, load: TrialLoad, steps: TrialSteps) -> "_Step":
        """Return the step, planned.  Raises AssertionError if its first layer's result is wrong."""
        batch, q_TNH = steps.batch(load), steps.queries(load)
        captured = load.phase == "decode" and self._graphs.captures
        planned = not (captured and is_capturable(backend))
        if captured and planned:
            if isinstance(backend, GraphAttentionBuilder):
                backend = backend.for_graph(batch)
            else:
                captured = False
        backend.plan_step(batch)
        steps.compare(backend.attend(0, q_TNH), q_TNH, batch)
        return _Step(backend, batch, q_TNH, captured, planned)

    def _time(self, backend: AttentionBackend, load: TrialLoad, steps: TrialSteps) -> float:
        """Return the microseconds of all layers of a step, including its plan unless graphs need none."""
        step = self._checked(backend, load, steps)

        def attend_all() -> None:
            for index in range(self._num_layers):
                step.backend.attend(index % self._spec.num_layers, step.q_TNH)

        if not step.captured:
            return self._microseconds(step.batch, step.backend, attend_all)
        graphs, memory = self._graphs, self._graphs.pool()
        try:
            with graphs.stream():
                attend_all()
                graphs.begin_capture(memory, load.rows)
                try:
                    attend_all()
                    replay = graphs.end().replay
                except BaseException:
                    graphs.abandon()
                    raise
                found = self._microseconds(step.batch, step.backend if step.planned else None, replay)
                del replay
                return found
        finally:
            graphs.drop(memory)

    def _microseconds(self, batch: AttentionBatch, planned: AttentionBackend | None, run: Callable[[], None]) -> float:
        """Return the microseconds of a step: the fastest of a few runs of many steps, as other load only adds time.

        planned: plans the batch before each step."""

        def work() -> None:
            if planned is not None:
                planned.plan_step(batch)
            run()

        for _ in range(WARM_UPS):
            work()
        self._wait()
        began = self._clock()
        work()
        self._wait()
        count = max(1, min(50, math.ceil(MEASURED_S / max(self._clock() - began, 1e-9))))
        fastest = math.inf
        for _ in range(REPEATS):
            began = self._clock()
            for _ in range(count):
                work()
            self._wait()
            fastest = min(fastest, (self._clock() - began) / count)
        return 1e6 * fastest

    def _wait(self) -> None:
        if self._entry.device.type == "cuda":
            torch.cuda.synchronize(self._entry.device)
