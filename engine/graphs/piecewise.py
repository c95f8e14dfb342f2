"""Steps with prefill: each replays the capture for the next larger number of tokens.

    step of n tokens -> size T >= n -> copy into static buffers, pad -> replay -> rows that sample -> logits

Between the captured parts, attention and recurrences run eagerly on the n real tokens; padding tokens store their keys
and values in the pool's dump page.  The LM head and sampling come after, on the rows that need them.

Legend: T tokens of a run, padding included · M most tokens of any run · N rows whose logits are wanted · D model dim
Owns: the static inputs, the choice of size, the time and order of captures.
Does not know: how the model is cut (``breakable.py`` alone, or with ``compiled.py``), the scheduler.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.graphs.attention import ATTENTION, BreakingAttention
from engine.graphs.breakable import GraphRecording, SegmentRecorder
from engine.graphs.capturing import Capturing, frozen_garbage, round_up
from engine.graphs.device import GraphDevice
from engine.graphs.states import BreakingStates
from engine.layers.attention import AttentionBatch
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.models.model import Model
from engine.types.errors import GraphError

PREFILL = "steps with prefill"
FEWEST_DIRECT = 2  # a compiled trace treats a single token as a constant


class Piecewise:
    """Runs steps with prefill; it has the interface of the model's ``forward``.

    hidden: the model's, or that of its compiled form; called with ``attention``.
    others: models beside ``model`` that a step may be run with, by name.
    sizes: ascending.
    any_size: whether ``hidden`` is compiled; then it also runs, directly and without padding, steps past the largest
    size, and all steps if the device cannot capture.
    inputs_3M: token ids, positions and slots of the largest run, int64; smaller ones use the first columns.
    Every rank makes the same decisions: they depend on the step alone.
    """

    def __init__(
        self,
        *,
        model: Model,
        hidden: Callable[[StepTensors], Tensor],
        pool: KVPool,
        attention: BreakingAttention,
        states: BreakingStates | None = None,
        device: GraphDevice,
        recorder: SegmentRecorder,
        capturing: Capturing,
        sizes: Sequence[int],
        any_size: bool = False,
        others: Mapping[str, Model] | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self._any_size = any_size
        self._model = model
        self._hidden = hidden
        self._others = dict(others or {})
        self._pool = pool
        self._attention = attention
        self._states = states
        self._device = device
        self._recorder = recorder
        self._capturing = capturing
        self._recordings: dict[tuple[int, str], GraphRecording] = {}
        self.inputs_3M = device.buffer((3, self.sizes[-1]), torch.int64)
        self._padding_31 = device.buffer((3, 1), torch.int64)
        self._padding_31[2] = pool.dump_page * pool.page_stride
        self._rows_0 = device.buffer((0,), torch.int64)

    @property
    def captured(self) -> tuple[int, ...]:
        """Captured sizes, ascending."""
        return tuple(sorted({size for size, _ in self._recordings}))

    @property
    def _advice(self) -> str:
        return (
            f"lower graphs.max_tokens (now {self.sizes[-1]}) or kv.memory_fraction, or turn them off with "
            "graphs.mode=decode, or all graphs with graphs.mode=off"
        )

    def forward(self, step: StepTensors) -> Tensor:
        return self._model.logits(self.hidden(step, step.sample_at_N))

    def has(self, num_tokens: int, model: str) -> bool:
        """Return whether there is a graph for so many tokens with another model."""
        return (round_up(self.sizes, num_tokens), model) in self._recordings

    def hidden(self, step: StepTensors, wanted_N: Tensor, model: str = "") -> Tensor:
        """Return x_ND of the wanted rows of T (``Model.hidden``).  model: name of another one, which ``has`` one."""
        num_tokens = len(step.token_ids_T)
        size = round_up(self.sizes, num_tokens)
        if size is None or not self._device.captures:
            return self._run_directly(step, wanted_N)
        if self._states is not None:
            assert step.states is not None, "a step of a model with recurrent layers has states"
            self._states.step = step.states
        self._fill(size, (step.token_ids_T, step.positions_T, step.slots_T), num_tokens)
        recording = self._recordings.get((size, model))
        if recording is None and self._states is not None:
            return self._run_directly(step, wanted_N)  # a capture runs a step twice, and states advance once
        result_TD = self._capture_late(size) if recording is None else recording.replay()
        return result_TD.index_select(0, wanted_N)

    @torch.inference_mode()
    def capture(self, progress: bool = False) -> None:
        """Capture every missing size; on a device without captures, compile.

        Raises GraphError, on every rank if one fails; then no graph remains.
        """
        if not self._device.captures:
            self._warm_up_direct_runs()
            return
        missing = sorted(set(self.sizes) - set(self.captured))
        self._plan_nothing()
        self._capturing.capture(
            PREFILL, missing, self._run_all, self._record_all, self._recordings.clear, advice=self._advice,
            progress=progress,
        )  # fmt: skip

    @torch.inference_mode()
    def measure(self) -> int:
        """Return the bytes that all captures will take; no graph remains.  Raises GraphError."""
        self._plan_nothing()
        return self._capturing.measure(
            self.sizes, self._run_all, self._record_all, self._recordings.clear, advice=self._advice
        )

    def _capture_late(self, size: int) -> Tensor:
        """Capture a size when a step needs it, on the step's own tokens, and return the step's result."""
        with self._device.stream():
            self._run(size)
            with frozen_garbage():
                self._capturing.wait_for_all()
                return self._record(size).result

    def _warm_up_direct_runs(self) -> None:
        """Compile now, so that no step has to wait for it."""
        if self.sizes[-1] >= FEWEST_DIRECT:
            self._plan_nothing()
            self._run(FEWEST_DIRECT)

    def _run_all(self, size: int) -> None:
        for name in ("", *self._others):
            self._run(size, name)

    def _record_all(self, size: int) -> None:
        for name in ("", *self._others):
            self._record(size, name)

    def _record(self, size: int, name: str = "") -> GraphRecording:
        recording = self._recorder.record(size, lambda: self._run(size, name))
        broken, layers = recording.breaks[ATTENTION], self._model.attention_spec.num_layers
        if broken != layers:
            raise GraphError(
                f"{size} tokens: the capture was broken at {broken} attention calls, the model has {layers} layers; "
                "attention that was captured would repeat the lengths of the capture"
            )
        self._recordings[size, name] = recording
        return recording

    def _run(self, size: int, name: str = "") -> Tensor:
        """Run a model on the static inputs; a warm-up loads what cannot be loaded inside a capture."""
        token_ids_T, positions_T, slots_T = self.inputs_3M[:, :size]
        hidden = self._others[name].hidden if name else self._hidden
        return hidden(
            StepTensors(
                token_ids_T, positions_T, slots_T, self._rows_0, self._attention, self._pool, states=self._states
            )
        )

    def _run_directly(self, step: StepTensors, wanted_N: Tensor) -> Tensor:
        num_tokens = len(step.token_ids_T)
        if num_tokens < FEWEST_DIRECT or not self._any_size:
            return self._model.hidden(step, wanted_N)
        self._recorder.num_tokens = num_tokens
        x_TD = self._hidden(
            StepTensors(step.token_ids_T, step.positions_T, step.slots_T, step.sample_at_N, self._attention, self._pool)
        )
        return x_TD.index_select(0, wanted_N)

    def _fill(self, size: int, inputs: Sequence[Tensor], num_tokens: int) -> None:
        """Copy the real tokens, then padding: token 0 at position 0, in the dump page."""
        self._recorder.num_tokens = num_tokens
        torch._foreach_copy_(list(self.inputs_3M[:, :num_tokens]), list(inputs))
        if num_tokens < size:
            self.inputs_3M[:, num_tokens:size] = self._padding_31

    def _plan_nothing(self) -> None:
        """Set all inputs to padding, and plan attention for one token in the dump page."""
        self._recorder.num_tokens = 1
        if self._states is not None:
            self._states.plan_nothing()
        self.inputs_3M.copy_(self._padding_31)
        one = torch.ones(1, dtype=torch.int32, device=self._pool.data.device)
        self._attention.plan_step(
            AttentionBatch(
                num_decodes=0,
                page_table_BP=one[None] * self._pool.dump_page,
                lengths_B=one,
                query_starts_B1=torch.cat((one - 1, one)),
                host_lengths=np.ones(1, dtype=np.int32),
                host_query_lengths=np.ones(1, dtype=np.int32),
            )
        )
