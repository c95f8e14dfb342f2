"""One rank's graphs, set up in the order in which a rank is loaded: communicator, model, pool, captures.

Owns: the effective graphs.mode on this device, the memory pool that all graphs of the rank share.
Does not know: how captures are done.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.execution.rows import DeviceRows
from engine.graphs.attention import BreakingAttention
from engine.graphs.breakable import SegmentRecorder
from engine.graphs.capturing import Capturing, decode_sizes, piecewise_sizes
from engine.graphs.comm import BreakingComm
from engine.graphs.decode import DECODES, DecodeGraphs
from engine.graphs.decode_attention import can_capture
from engine.graphs.device import GraphDevice, Pool, device_for_graphs
from engine.graphs.passes import GraphPass
from engine.graphs.piecewise import PREFILL, Piecewise
from engine.graphs.settings import CaptureSettings
from engine.graphs.states import BreakingStates
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates
from engine.layers.step import StepTensors
from engine.models.model import Model
from engine.sampling.sampler import Sampler
from engine.settings.sections import GraphsSection, SchedulerSection
from engine.types.errors import ConfigError, GraphError

log = logging.getLogger(__name__)

OFF = "off"
DECODE = "decode"
COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class StepParts:
    """The objects that run a rank's steps.  states: of recurrent layers; None for a model without them.

    others: further models whose steps are captured, by name.
    samples: the most tokens of one row that are sampled in a step."""

    model: Model
    pool: KVPool
    attention: AttentionBackend
    rows: DeviceRows
    sampler: Sampler
    states: RecurrentStates | None = None
    others: Mapping[str, Model] = field(default_factory=dict)
    samples: int = 1


class Captured(Protocol):
    """Work of one kind that is captured in several sizes."""

    def capture(self, progress: bool = False) -> None:
        """Capture all sizes.  Raises GraphError, on every rank if one fails; then no graph remains."""
        ...

    def measure(self) -> int:
        """Return the bytes that all captures will take; no graph remains.  Raises GraphError."""
        ...


C = TypeVar("C", bound=Captured)


@dataclass(frozen=True, slots=True)
class CaptureKit:
    """The tools with which a feature captures work on rows.  sizes: numbers of rows, ascending."""

    device: GraphDevice
    recorder: SegmentRecorder
    capturing: Capturing
    sizes: Sequence[int]


class RankGraphs:
    """The graphs of one rank.

    comm: communicator to load the model with.  device: interface for every capture of this rank.
    passes: for compiled pieces.
    Raises ConfigError for a mode that the device cannot do, and for passes that the mode does not use."""

    def __init__(
        self, section: GraphsSection, device: torch.device, comm: Comm, passes: Sequence[tuple[str, GraphPass]] = ()
    ) -> None:
        self.device = device_for_graphs(device)
        self.mode = choose_mode(section.mode, self.device.captures)
        if passes and self.mode != COMPILED:
            raise ConfigError(
                f"plugins.graph_passes: passes are for compiled pieces, and graphs.mode is {self.mode!r} here; set "
                "graphs.mode=compiled"
            )
        self.comm = comm
        self._section, self._settings = section, CaptureSettings.read(section)
        self._passes = tuple(passes)
        self._recorder: SegmentRecorder | None = None
        self._pool: Pool = None
        self._pool_serves = False  # whether kept graphs have been captured into it
        if self.mode != OFF:
            self._pool = self.device.pool()
            self._recorder = SegmentRecorder(self.device, self._pool)
            if comm.size > 1:
                self.comm = BreakingComm(comm, self._recorder)

    def break_at(self, operations: Sequence[str]) -> None:
        """Keep operations out of graphs.  Call it when all plugins are loaded, and before any capture."""
        if self._recorder is not None:
            self._recorder.break_at(operations)

    def piecewise(self, parts: StepParts, scheduler: SchedulerSection, progress: bool) -> Piecewise | None:
        """Return steps with prefill, captured or compiled up to the largest step; None if off, or failed under 'auto'.

        Raises GraphError on failure if the configuration names the mode.
        """
        piecewise = self._new_piecewise(parts, scheduler)
        return piecewise if piecewise is not None and self._captured(piecewise, PREFILL, progress) else None

    def decode(self, parts: StepParts, scheduler: SchedulerSection, progress: bool) -> DecodeGraphs | None:
        """Return decode steps captured up to the largest batch; None if off, impossible, or failed under 'auto'.

        Raises GraphError on failure if the configuration names the mode.
        """
        if self._recorder is not None and self.device.captures and not can_capture(parts.attention):
            log.info("%s are not captured whole: this attention backend plans its work on the host", DECODES)
        graphs = self._new_decode(parts, scheduler)
        return graphs if graphs is not None and self._captured(graphs, DECODES, progress) else None

    def more(
        self, what: str, build: Callable[[CaptureKit], C], where: torch.device, max_rows: int, progress: bool
    ) -> C | None:
        """Return work of a feature, captured after all steps; None if off, or failed under 'auto'.

        Without captured steps nothing keeps weights where they are, and none is captured.  where: as for ``Capturing``.
        Raises GraphError on failure if the configuration names the mode."""
        if self._recorder is None or not self.device.captures or not self._pool_serves:
            return None
        built = build(self._kit(self._recorder, where, max_rows))
        return built if self._captured(built, what, progress) else None

    def more_bytes(self, build: Callable[[CaptureKit], Captured], where: torch.device, max_rows: int) -> int:
        """Return the bytes that ``more`` will take, to one of the ``others`` of ``measure``."""
        assert self._recorder is not None, "nothing is captured"
        try:
            return build(self._kit(self._recorder, where, max_rows)).measure()
        except GraphError:
            if self._section.mode != "auto":
                raise
            return 0  # ``more`` warns

    def _kit(self, recorder: SegmentRecorder, where: torch.device, max_rows: int) -> CaptureKit:
        sizes = decode_sizes(min(self._settings.max_rows, max_rows))
        return CaptureKit(self.device, recorder, Capturing(self.device, self.comm, where), sizes)

    def measure(self, parts: StepParts, scheduler: SchedulerSection, others: Iterable[Callable[[], int]] = ()) -> int:
        """Return the bytes that ``piecewise`` and ``decode`` will take, by trial captures over a pool of any size.

        others: each returns the bytes of work that ``more`` captures behind steps, by ``more_bytes``.
        On failure, raises GraphError if the configuration names the mode; else graphs are off.
        """
        if self._recorder is None or not self.device.captures:
            return 0
        trial = self.device.pool()
        self._recorder.use(trial)
        try:
            return self._measure(parts, scheduler, others)
        except GraphError as error:
            if self._section.mode != "auto":
                raise
            log.warning("graphs are off: %s", error)
            self._recorder = None
            return 0
        finally:
            if self._recorder is not None:
                self._recorder.use(self._pool)
            self.device.drop(trial)

    def _measure(self, parts: StepParts, scheduler: SchedulerSection, others: Iterable[Callable[[], int]]) -> int:
        # A method of its own, so that the trials are freed when it returns.
        both = (self._new_piecewise(parts, scheduler), self._new_decode(parts, scheduler))
        trials = [graphs for graphs in both if graphs is not None]
        num_bytes = sum(graphs.measure() for graphs in trials)
        return num_bytes + sum(measure() for measure in others) if trials else 0

    def _new_piecewise(self, parts: StepParts, scheduler: SchedulerSection) -> Piecewise | None:
        if self._recorder is None or self.mode == DECODE:
            return None
        model, pool = parts.model, parts.pool
        sizes = piecewise_sizes(min(self._settings.max_tokens, scheduler.max_step_tokens))
        attention = BreakingAttention(
            parts.attention,
            model.attention_spec,
            self._recorder,
            self.device,
            sizes[-1] if self.device.captures else 0,
            model.dtype,
        )
        states = None if parts.states is None else BreakingStates(parts.states, self._recorder, self.device)
        hidden: Callable[[StepTensors], Tensor] = model.hidden
        if self.mode == COMPILED:
            # Imported here: a compiler takes seconds to import, and other modes do not need it.
            from engine.graphs.compiled import CompiledModel

            hidden = CompiledModel(
                model=model,
                pool=pool,
                attention=attention,
                comm=self.comm,
                recorder=self._recorder,
                compiler="inductor",
                passes=self._passes,
                named=self._recorder.named,
            ).hidden
        return Piecewise(
            model=model,
            hidden=hidden,
            pool=pool,
            attention=attention,
            states=states,
            device=self.device,
            recorder=self._recorder,
            capturing=Capturing(self.device, self.comm, pool.data.device),
            sizes=sizes,
            any_size=self.mode == COMPILED,
            others=parts.others if self.device.captures and self.mode != COMPILED else {},
        )

    def _new_decode(self, parts: StepParts, scheduler: SchedulerSection) -> DecodeGraphs | None:
        if self._recorder is None or not self.device.captures or not can_capture(parts.attention):
            return None
        if parts.model.task_head is not None:
            return None  # a model that generates nothing never decodes
        most = min(scheduler.max_running * parts.samples, max(scheduler.max_running, scheduler.max_step_tokens))
        return DecodeGraphs(
            model=parts.model,
            others=parts.others,
            pool=parts.pool,
            attention=parts.attention,
            rows=parts.rows,
            sampler=parts.sampler,
            states=parts.states,
            device=self.device,
            recorder=self._recorder,
            capturing=Capturing(self.device, self.comm, parts.pool.data.device),
            sizes=decode_sizes(min(self._settings.max_rows, most)),
        )

    def _captured(self, graphs: Captured, what: str, progress: bool) -> bool:
        try:
            graphs.capture(progress)
        except GraphError as error:
            if self._section.mode != "auto":
                raise
            log.warning("%s run without graphs: %s", what, error)
        else:
            self._pool_serves = True
            return True
        if not self._pool_serves and self._recorder is not None:
            failed, self._pool = self._pool, self.device.pool()
            self._recorder.use(self._pool)
            self.device.drop(failed)  # else the memory that it took before it failed would be lost
        return False


def choose_mode(setting: str, captures: bool) -> str:
    """Return graphs.mode, or for 'auto' the device's default.  Raises ConfigError if the device cannot capture."""
    if setting == "auto":
        mode = "breakable" if captures else OFF
        log.info("graphs: %s (%s)", mode, "a GPU is present" if captures else "a CPU has no graphs to replay")
        return mode
    if setting in ("breakable", DECODE) and not captures:
        raise ConfigError(
            f"graphs.mode={setting}: captures need an NVIDIA GPU, this engine runs on the CPU; use 'off', or "
            "'compiled', which compiles the same pieces and runs them directly"
        )
    return setting
