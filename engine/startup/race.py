"""Attention measured: every backend that can run here, and every variant that it declares, on the model's own heads.

Legend: T new tokens of a step · B sequences · N query heads · H head size
Owns: which steps are timed and how, what is kept for the next start.
Does not know: which backends there are, who is taken (``standings.py``), how a rank is put together.

A backend that raises, computes something else than attention or is not done in time is in the table with its reason,
and is never chosen.  Rank 0 measures, and all ranks take its choice.
"""

import gc
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from engine.cache_folder import cache_folder, replace_file
from engine.config import Config
from engine.errors import PluginError
from engine.execution.attention import context_of
from engine.graphs.device import GraphDevice, device_for_graphs
from engine.layers.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    GraphAttentionBuilder,
    is_capturable,
)
from engine.layers.comm import Comm
from engine.layers.kv_pool import Layout
from engine.patience import returns_within
from engine.plugins.declaration import Phase
from engine.plugins.manager import ATTENTION, Plugins
from engine.plugins.selection import BOTH, NOT_MEASURED, Contender, Measured, ask, contenders
from engine.plugins.testing.attention import NUM_LAYERS, check_steps
from engine.plugins.testing.attention_cases import trial_cases
from engine.startup.preview import preview_attention
from engine.startup.standings import Report, Result
from engine.startup.trial_steps import LOADS, Load, TrialSteps

log = logging.getLogger(__name__)

MOST_LAYERS = 16  # one after the other, so that keys come from memory and not from a cache, as in a step
LONGEST_S = 24 * 3600.0
WARM_UPS, REPEATS, MEASURED_S = 2, 3, 0.02


class Race:
    """One rank's heads, on its own device.

    limit_s: for all contenders together, what is compiled included; one that is not done by then is out.  0: no race.
    clock: seconds; what contenders are timed by.
    """

    def __init__(
        self,
        plugins: Plugins,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        layout: Layout = "layer_first",
        kv_dtype: str = "",
        *,
        limit_s: float,
        graphs: GraphDevice | None = None,
        loads: Sequence[Load] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plugins = plugins
        self._page_size = page_size
        self._device = device
        self._dtype = dtype
        self._limit_s = limit_s
        self._graphs = graphs or device_for_graphs(device)
        self._loads = tuple(loads) or LOADS[device.type]
        self._clock = clock
        self._num_layers = spec.num_layers
        self._spec = spec.shortened(MOST_LAYERS)
        self._layout, self._kv_dtype = layout, kv_dtype
        self._context = context_of(spec, page_size, device, dtype, layout, kv_dtype)
        with plugins.choosing:
            self._contenders: dict[Phase, tuple[list[Contender], dict[str, str]]] = {
                phase: contenders(plugins, replace(self._context, phases=(phase,))) for phase in BOTH
            }

    def decide(self, progress: bool) -> Measured:
        """What 'auto' takes, where it has a choice and may measure."""
        if not self._limit_s or not self._undecided():
            return NOT_MEASURED
        report = self.known()
        if report is None:
            log.info("attention: a race begins, and may take %g s; plugins.race_s=0 skips it", self._limit_s)
            report = self.run()
            report.tell()
            if progress:
                Console(stderr=True).print(report.table())
        return report.fastest()

    def _undecided(self) -> bool:
        """Whether 'auto' has more than one to choose from, for a phase that was left to it."""
        wanted = self._plugins.attention
        names = (wanted.prefill, wanted.decode)
        auto = [phase for phase, name in zip(BOTH, names, strict=True) if name == "auto"]
        return any(len(self._contenders[phase][0]) > 1 for phase in auto)

    def known(self) -> Report | None:
        """What an earlier race of the same contenders on the same heads, device and versions has found."""
        path = self._path()
        if path is None or not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Report)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("what attention backends were measured in %s is not used: %s", path, error)
            return None

    @torch.inference_mode()
    def run(self) -> Report:
        """Measure, and keep the result, unless somebody was not done in time: the next start tries again."""
        began = time.monotonic()
        place = (self._spec, self._page_size, self._device, self._dtype)
        steps = TrialSteps(*place, self._loads, self._layout, self._kv_dtype)
        results: dict[str, list[Result]] = {}
        for phase, (entrants, passed_over) in self._contenders.items():
            results[phase] = []
            for contender in entrants:
                left_s = self._limit_s - (time.monotonic() - began)
                results[phase].append(self._entered(contender, phase, steps, left_s))
            results[phase] += [Result(name, {}, {}, reason) for name, reason in passed_over.items()]
        del steps
        gc.collect()
        self._graphs.trim()
        report = Report(self._about(), results)
        log.info("attention: the race took %.1f s", time.monotonic() - began)
        if report.complete and (path := self._path()) is not None:
            try:
                replace_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1))
            except OSError as error:
                log.warning("what attention backends were measured is not kept for the next start: %s", error)
        return report

    def _entered(self, contender: Contender, phase: Phase, steps: TrialSteps, left_s: float) -> Result:
        """Its result, whatever it does."""
        result = partial(Result, contender.name, dict(contender.options))
        late = result({}, f"not done within the {self._limit_s:g} s for all", late=True)
        if left_s <= 0:
            return late
        us: dict[str, float] = {}
        problem = ""

        def compute() -> None:
            nonlocal problem
            try:
                with torch.inference_mode():
                    if self._device.type == "cuda":
                        torch.cuda.set_device(self._device)
                    self._measure(contender, phase, steps, us)
                    self._wait()
            except BaseException as error:  # whatever it is, it is this one's
                problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]

        if not returns_within(left_s, compute, f"race of {contender}"):
            return late
        if problem:
            try:
                self._wait()
            except RuntimeError as error:
                raise PluginError(
                    f"attention.{contender.name} has left the GPU in a state that nothing runs in ({problem}); "
                    "name another backend in plugins.attention, or set plugins.race_s=0"
                ) from error
        return result(us, problem)

    def _measure(self, contender: Contender, phase: Phase, steps: TrialSteps, us: dict[str, float]) -> None:
        """Fill ``us``.  Raises whatever the backend does, and AssertionError if it is wrong."""
        context = replace(self._context, phases=(phase,))
        with self._plugins.choosing:
            choice = ask(self._plugins, contender, context, "measured")
        spec = self._spec
        small = spec.shortened(NUM_LAYERS)
        shape = (self._page_size, spec.head_size, spec.window, (phase,), self._layout, self._kv_dtype)
        for case in trial_cases(context.dtype, *shape):
            check_steps(case, choice.factory, small, self._device)
        backend = choice.factory(self._spec, steps.pool)
        for load in steps.loads:
            if load.phase == phase:
                us[str(load)] = self._time(backend, load, steps)
        if not us:
            raise PluginError("there is no memory for a step to measure it with")

    def _time(self, backend: AttentionBackend, load: Load, steps: TrialSteps) -> float:
        """Microseconds of all layers of a step, its plan included unless graphs need none."""
        batch, q_TNH = steps.batch(load), steps.queries(load)
        captured = load.phase == "decode" and self._graphs.captures
        planned = not (captured and is_capturable(backend))
        if captured and planned:
            if not isinstance(backend, GraphAttentionBuilder):
                captured = False
            else:
                backend = backend.for_graph(batch)
        backend.plan_step(batch)
        steps.compare(backend.attend(0, q_TNH), q_TNH, batch)

        def attend_all() -> None:
            for index in range(self._num_layers):
                backend.attend(index % self._spec.num_layers, q_TNH)

        if not captured:
            return self._microseconds(batch, backend, attend_all)
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
                found = self._microseconds(batch, backend if planned else None, replay)
                del replay
                return found
        finally:
            graphs.drop(memory)

    def _microseconds(self, batch: AttentionBatch, planned: AttentionBackend | None, run: Callable[[], None]) -> float:
        """Of a step: the fastest of a few runs of as many steps as take a while, as all else on the machine only adds.

        planned: plans the batch before each of them."""

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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _about(self) -> str:
        spec = self._spec
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        window = f", window {spec.window} from layer {spec.first_window_layer}" if spec.window else ""
        window += "".join(f", {one}" for one in spec.needs)
        return (
            f"{name}, {spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_size} in {self._num_layers} layers"
            f"{window}, {self._context.dtype}, page {self._page_size}, {self._layout}"
            + (f", {self._kv_dtype} pages" if self._kv_dtype else "")
        )

    def _path(self) -> Path | None:
        """Named by all that a result depends on."""
        folder = cache_folder("attention.race")
        entrants = {phase: [str(one) for one in found] for phase, (found, _) in self._contenders.items()}
        names = sorted({one.name for found, _ in self._contenders.values() for one in found})
        packages = [_version(self._plugins, name) for name in names]
        options = {name: dict(self._plugins.options.get(f"attention.{name}", {})) for name in names}
        holds_for = (self._about(), torch.__version__, torch.version.cuda, packages, entrants, options, self._loads)
        digest = hashlib.sha256(repr(holds_for).encode()).hexdigest()[:16]
        return folder and folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', self._about())[:80]}-{digest}.json"


def _version(plugins: Plugins, name: str) -> str:
    """Of the plugin, and of every package that it may take, none of which is imported."""
    info = plugins.known[f"attention.{name}"]
    found = [f"{info.distribution} {info.version}"]
    for distribution in ("flashinfer-python", "flash-attn", "flash-attn-3", "sgl-kernel", "triton"):
        try:
            found.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def race_for(config: Config) -> Race:
    """The race of a start with this configuration, without the start; it may take as long as it takes, with
    plugins.race_s=0.  Raises ConfigError, WeightsError, PluginError."""
    spec, device, dtype = preview_attention(config)
    plugins = Plugins({ATTENTION: config.plugins.attention}, options=config.plugins.options)
    limit_s = config.plugins.race_s or LONGEST_S
    kv_dtype = config.kv.kept_as(str(dtype).removeprefix("torch."))
    return Race(plugins, spec, config.kv.page_size, device, dtype, config.kv.layout, kv_dtype, limit_s=limit_s)


def measured_attention(race: Race, comm: Comm, device: torch.device, progress: bool) -> Measured:
    """What 'auto' takes on every rank: by rank 0's race, or an earlier one.  progress: show a race that is run."""
    measured: Measured = race.decide(progress) if comm.rank == 0 else NOT_MEASURED
    if comm.size == 1:
        return measured
    told = msgspec.json.encode({phase: (one.name, one.options) for phase, one in measured.items()})
    told = _from_rank_0(told, comm, device)
    return {phase: Contender(*one) for phase, one in msgspec.json.decode(told).items()}


def _from_rank_0(said: bytes, comm: Comm, device: torch.device) -> bytes:
    length = int(comm.all_gather(torch.tensor([len(said)], dtype=torch.int64, device=device), 0)[0])
    padded = torch.frombuffer(bytearray(said.ljust(length, b" ")[:length]), dtype=torch.uint8).to(device)
    return bytes(comm.all_gather(padded, 0)[:length].cpu().numpy())
