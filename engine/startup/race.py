"""A race of attention backends: every one that can run here, in every variant that it declares, on the model's heads.

Owns: which backends are measured, for how long, which results are kept for the next start.
Does not know: which backends there are, how one is measured (``measurement.py``) and in what process
(``race_process.py``), which one is taken (``standings.py``), how a rank is put together.

A backend that raises, computes something else than attention or is not done in time is in the table with its reason,
and is never chosen.  Rank 0 measures, and all ranks take its choice.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Protocol

import msgspec
import torch

from engine.config import Config
from engine.execution.attention import context_of
from engine.execution.device import free_bytes
from engine.host.kept_results import KeptResults
from engine.host.memory import available_bytes
from engine.host.timeouts import named_while_slow
from engine.layers.attention import AttentionSpec
from engine.layers.comm import Comm
from engine.layers.kv_pool import Layout
from engine.plugins.attention.settings import AttentionSettings
from engine.plugins.declaration import Phase
from engine.plugins.kinds import ATTENTION
from engine.plugins.manager import Plugins
from engine.plugins.proof.attention import NUM_LAYERS
from engine.plugins.selection import BOTH, NOT_MEASURED, Contender, Measured, contenders
from engine.settings.own_kernels import missing_for_flashinfer
from engine.startup.measurement import RaceEntry
from engine.startup.preview import preview_attention
from engine.startup.race_process import RaceAnswer, RaceProcess
from engine.startup.standings import RaceReport, RaceResult
from engine.startup.trial_steps import LOADS, TrialLoad, pool_bytes

log = logging.getLogger(__name__)

LONGEST_S = 24 * 3600.0
# Together with the default of race_s less than the ten minutes that other ranks wait in a collective.  What a
# contender that was given up had compiled is on disk for the next start.
COMPILE_S = 480.0
HOST_BYTES = 2 << 30  # of the host's memory that such a process takes
PROCESS_BYTES = 3 << 29  # of a process that compiles, beside its pool: its context on the GPU, what its library takes
MOST_TRIES = 2
NO_TIME = RaceAnswer({}, "no time was left for it", late=True, begun=False)


class Measurer(Protocol):
    """The measurement of one contender in some phases, as ``RaceProcess`` runs it."""

    def compiled(self, timeout_s: float) -> Sequence[RaceAnswer]:
        """Wait until every entry is compiled or has failed.  Return their answers, fewer if that takes longer."""
        ...

    def measured(self, number: int, timeout_s: float) -> RaceAnswer | None:
        """Let it measure an entry.  Return None if that takes longer."""
        ...

    def end(self) -> None:
        """End the measurement and everything that it has started."""
        ...


@dataclass(slots=True)
class _TimeLeft:
    """The seconds that are left for compilers, and for measuring."""

    compile_s: float
    measure_s: float


class AttentionRace:
    """The race for one rank's heads, on its own device.

    limit_s: for measuring all contenders together.  0: no race.  compile_s: for everything that they compile before.
    start: starts one contender, in all its phases, in a process of its own, so that a late one never touches the
    engine's device.
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
        compile_s: float = COMPILE_S,
        loads: Sequence[TrialLoad] = (),
        start: Callable[[Sequence[RaceEntry]], Measurer] = RaceProcess,
    ) -> None:
        self._plugins = plugins
        self._spec = spec
        self._page_size = page_size
        self._device = device
        self._dtype = dtype
        self._limit_s, self._compile_s = limit_s, compile_s
        self._loads = tuple(loads) or LOADS[device.type]
        self._start = start
        self._layout: Layout = layout
        self._kv_dtype = kv_dtype
        self._context = context_of(spec, page_size, device, dtype, layout, kv_dtype)
        with plugins.choosing:
            self._contenders: dict[Phase, tuple[list[Contender], dict[str, str]]] = {
                phase: contenders(plugins, replace(self._context, phases=(phase,))) for phase in BOTH
            }

    def decide(self, progress: bool) -> Measured:
        """Return the choice of 'auto', if it has one and may measure."""
        if self._device.type == "cuda" and self._left_to_auto() and (advice := missing_for_flashinfer()):
            log.warning("attention: FlashInfer cannot run, and slower kernels take its place. %s", advice)
        if not self._limit_s or not self._undecided():
            return NOT_MEASURED
        known = self.known()
        if left := self._left(known):
            log.info(
                "attention: a race of %d begins: for at most %g s they are compiled, for at most %g s measured; "
                "plugins.race_s=0 skips it",
                len(left),
                self._compile_s,
                self._limit_s,
            )
            known = self.run(known)
            known.log_all()
            if progress:
                from rich.console import Console

                Console(stderr=True).print(known.table())
        return known.fastest()

    def _undecided(self) -> bool:
        """Return whether 'auto' has more than one backend to choose from, for a phase that was left to it."""
        return any(len(self._contenders[phase][0]) > 1 for phase in self._left_to_auto())

    def _left_to_auto(self) -> list[Phase]:
        wanted = self._plugins.attention
        names = (wanted.prefill, wanted.decode)
        return [phase for phase, name in zip(BOTH, names, strict=True) if name == "auto"]

    def known(self) -> RaceReport:
        """Return the results of earlier races of the same contenders on the same heads, device and versions."""
        return RaceReport(self._about(), self._kept().load() or self._report({}).results)

    def run(self, known: RaceReport | None = None) -> RaceReport:
        """Measure whatever ``known`` lacks, and keep each result as it comes: the next start continues from there.

        A contender that lacked time is measured again then, MOST_TRIES times in all."""
        began = time.monotonic()
        known = known or self._report({})
        found = known.by_contender()
        for entry, answer in self._answers(self._left(known)):
            key = (entry.phase, str(entry.contender))
            if answer.took:
                took = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in answer.took.items())
                log.info("attention race, %s: %s: %s", *key, took)
            tries = answer.begun + (found[key].tries if key in found else 0)
            late = answer.late and tries < MOST_TRIES
            options = dict(entry.contender.options)
            found[key] = RaceResult(entry.contender.name, options, answer.us, answer.problem, late, tries)
            known = self._report(found)
            self._kept().keep(known.results)
        log.info("attention: the race took %.1f s", time.monotonic() - began)
        return known

    def _left(self, known: RaceReport) -> list[RaceEntry]:
        """Return the contenders without a result, in every phase that they can run in."""
        spec = replace(self._spec, sinks=tuple(one.cpu() for one in self._spec.sinks))
        place = (spec, self._page_size, self._device, self._dtype, self._layout, self._kv_dtype, self._loads)
        options = {name: dict(table) for name, table in self._plugins.options.items()}
        found = known.by_contender()
        return [
            RaceEntry(Contender(one.name, dict(one.options)), phase, options, *place)
            for phase, (entrants, _) in self._contenders.items()
            for one in entrants
            if (phase, str(one)) not in found or found[phase, str(one)].late
        ]

    def _answers(self, entries: Sequence[RaceEntry]) -> Iterator[tuple[RaceEntry, RaceAnswer]]:
        """Measure each entry.  Many contenders at once are compiled, and then measured one after the other."""
        by_contender: dict[str, list[RaceEntry]] = {}
        for entry in entries:
            by_contender.setdefault(str(entry.contender), []).append(entry)
        groups, left = list(by_contender.values()), _TimeLeft(self._compile_s, self._limit_s)
        few_layers = self._spec.shortened(NUM_LAYERS)
        pool = pool_bytes(few_layers, self._page_size, self._dtype, self._loads, self._kv_dtype)
        at_once = processes_at_once(self._device, pool)
        for first in range(0, len(groups), at_once):
            yield from self._group_answers(groups[first : first + at_once], left)

    def _group_answers(
        self, group: Sequence[Sequence[RaceEntry]], left: "_TimeLeft"
    ) -> Iterator[tuple[RaceEntry, RaceAnswer]]:
        """Measure each entry of contenders that are compiled at once.  left: is reduced."""
        if left.compile_s <= 0 or left.measure_s <= 0:
            yield from ((entry, NO_TIME) for entries in group for entry in entries)
            return
        processes: list[Measurer] = []
        try:
            processes.extend(map(self._start, group))
            began = time.monotonic()
            with named_while_slow(f"attention: compiling {', '.join(str(one[0].contender) for one in group)}"):
                compiled = [one.compiled(began + left.compile_s - time.monotonic()) for one in processes]
            left.compile_s -= time.monotonic() - began
            for process, entries, answers in zip(processes, group, compiled, strict=True):
                if len(answers) < len(entries):
                    process.end()  # before others are measured
            for process, entries, answers in zip(processes, group, compiled, strict=True):
                for number, entry in enumerate(entries):
                    if number < len(answers) and answers[number].problem:
                        yield entry, answers[number]
                    elif len(answers) < len(entries):
                        yield entry, RaceAnswer({}, f"not compiled within the {self._compile_s:g} s for all", late=True)
                    else:
                        yield entry, self._measured(process, number, left)
                process.end()  # so that its memory is free again
        finally:
            for process in processes:
                process.end()

    def _measured(self, process: Measurer, number: int, left: "_TimeLeft") -> RaceAnswer:
        if left.measure_s <= 0:
            return NO_TIME
        began = time.monotonic()
        answer = process.measured(number, left.measure_s)
        left.measure_s -= time.monotonic() - began
        return answer or RaceAnswer({}, f"not measured within the {self._limit_s:g} s for all", late=True)

    def _report(self, found: Mapping[tuple[str, str], RaceResult]) -> RaceReport:
        """Return the results in the order of preference; backends that cannot run here come last."""
        results: dict[str, list[RaceResult]] = {}
        for phase, (entrants, passed_over) in self._contenders.items():
            results[phase] = [found[phase, str(one)] for one in entrants if (phase, str(one)) in found]
            results[phase] += [RaceResult(name, {}, {}, reason) for name, reason in passed_over.items()]
        return RaceReport(self._about(), results)

    def _about(self) -> str:
        spec = self._spec
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        window = f", window {spec.window} from layer {spec.first_window_layer}" if spec.window else ""
        window += "".join(f", {one}" for one in spec.needs)
        return (
            f"{name}, {spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_size} in {spec.num_layers} layers"
            f"{window}, {self._context.dtype}, page {self._page_size}, {self._layout}"
            + (f", {self._kv_dtype} pages" if self._kv_dtype else "")
        )

    def _kept(self) -> KeptResults[dict[str, list[RaceResult]]]:
        """Return the results on the disk, by all that they depend on."""
        entrants = {phase: [str(one) for one in found] for phase, (found, _) in self._contenders.items()}
        names = sorted({one.name for found, _ in self._contenders.values() for one in found})
        packages = [_version(self._plugins, name) for name in names]
        options = {name: dict(self._plugins.options.get(f"attention.{name}", {})) for name in names}
        holds_for = (torch.__version__, torch.version.cuda, packages, entrants, options, self._loads)
        return KeptResults("attention", self._about(), holds_for, dict[str, list[RaceResult]])


def processes_at_once(device: torch.device, num_bytes: int) -> int:
    """Return the number of processes that may compile at once: there are a core and memory of the device and of the
    host for each.

    num_bytes: of a process's pool."""
    places = free_bytes(device) // (PROCESS_BYTES + num_bytes), available_bytes() // HOST_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), *places))


def _version(plugins: Plugins, name: str) -> str:
    """Return the versions of the plugin and of every package that it may use, none of which is imported."""
    info = plugins.known[f"attention.{name}"]
    found = [f"{info.distribution} {info.version}"]
    for distribution in ("flashinfer-python", "flash-attn", "flash-attn-3", "sgl-kernel", "triton"):
        try:
            found.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def race_for(config: Config) -> AttentionRace:
    """Return the race of a start with this configuration, without the start.  Compilers have no limit of time, and
    with plugins.race_s=0 steps have none.  Raises ConfigError, WeightsError, PluginError."""
    spec, device, dtype = preview_attention(config)
    settings = AttentionSettings.of(config)
    plugins = Plugins({ATTENTION: settings.attention}, options=config.plugins.options)
    limit_s = settings.race_s or LONGEST_S
    kv_dtype = config.kv.kept_as(str(dtype).removeprefix("torch."))
    return AttentionRace(
        plugins,
        spec,
        config.kv.page_size,
        device,
        dtype,
        config.kv.layout,
        kv_dtype,
        limit_s=limit_s,
        compile_s=LONGEST_S,
    )


def measured_attention(race: AttentionRace, comm: Comm, device: torch.device, progress: bool) -> Measured:
    """Return the choice of 'auto' on every rank, by rank 0's race or an earlier one.  progress: show the race."""
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
