"""The runner: one rank's model, KV pool, rows and sampler, and how a step goes through them.

Owns: everything on the device.  Does not know: requests, text, threads, which features there are; it knows rows.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from engine.actors.runner import Answer
from engine.execution.batch import lay_out
from engine.execution.captured_steps import CapturedDecodes, CapturedModel, Captures
from engine.execution.features import RankFeature, hooks
from engine.execution.launched_step import LaunchedStep, sampled_places
from engine.execution.profiles import Profiles
from engine.execution.prompt_logprobs import PromptScores
from engine.execution.prompts import PromptResult, Prompts, WantedStates
from engine.execution.rank_end import RankEnd
from engine.execution.rows import DeviceRows
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.step import StepTensors
from engine.messages import Admission, FeatureRequest, Step
from engine.models.model import Model
from engine.sampling.captured import SamplingVariant
from engine.sampling.constraints import LATE_MASKS, Constraints, PendingMasks
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.state import Newcomer


class ModelRunner:
    """A rank's runner: it launches steps in the order they come, all of them on one thread.

    graphs: the captures of the device.
    piecewise: the model captured in pieces; None if steps with prefill run like others.
    states: of recurrent layers; None for a model without them.
    whole_decodes: runs whole decode steps; None if they run like others.
    features: the optional parts of the rank, in their order."""

    def __init__(
        self,
        *,
        comm: Comm,
        graphs: Captures,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        piecewise: CapturedModel | None,
        whole_decodes: CapturedDecodes | None,
        rows: DeviceRows,
        states: RecurrentStates | None = None,
        constraints: Constraints,
        sampler: Sampler,
        eos_token_ids: tuple[int, ...],
        features: Sequence[RankFeature] = (),
    ) -> None:
        self.num_pages = pool.num_pages
        self._rank = comm.rank
        self._pool = pool
        self._attention = attention
        self._model = model
        self._whole_decodes = whole_decodes
        self._prefilling: Model | CapturedModel = model if piecewise is None else piecewise
        # If nothing runs a whole step, the model captured between attention calls is better than nothing.
        captured = piecewise is not None and piecewise.captured and whole_decodes is None
        self._decoding = self._prefilling if captured else model
        self._rows = rows
        self._states = states
        self._constraints = constraints
        self._prompts = Prompts((PromptScores(sampler), *(one.reader for one in features if one.reader is not None)))
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._on_cuda = pool.data.device.type == "cuda"
        self._features = features
        self._begins = hooks(features, "begin")
        self._applies = hooks(features, "apply")
        self._launches = hooks(features, "launched")
        self._profiles = Profiles(comm.rank)
        self.profile = self._profiles.begin
        self._end = RankEnd(comm, graphs, features)
        self.close, self.leave = self._end.close, self._end.leave

    def receive(self, message: FeatureRequest, answer: Answer) -> None:
        """Pass a message that is no step to the feature that takes it."""
        taken = any(feature.receive(message, answer) for feature in self._features)
        assert taken, f"no feature of rank {self._rank} takes a request of {message.feature}"

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Queue one forward pass and its sampling.

        Raises MemoryError if the device has no room for it.  The step's changes have then been taken in, and its
        batch has not run: it may be launched again, whole or in parts.  RuntimeError if it adds to sums or states."""
        for begin in self._begins:
            begin(step)
        for apply in self._applies:
            step = apply(step)
        whole = self._whole_for(step)
        if whole is None:
            self._apply(step)
        else:
            whole.apply(step)
        computed = self._rows.computed.copy()
        try:
            with self._profiles.step(step.step_id) if self._profiles.recording else nullcontext():
                launched = self._run(step) if whole is None else self._run_whole(whole, step)
        except (MemoryError, torch.OutOfMemoryError) as error:  # the first from kernels in C
            if self._prompts.sums_in(step) or self._states is not None:
                raise RuntimeError(f"no room for a step that adds up, and so cannot run twice: {error}") from error
            self._rows.restore(computed)
            raise MemoryError(str(error)) from None
        if self._constraints.rows:
            launched.parts[LATE_MASKS] = self._constraints.late()
        for note in self._launches:
            note(step, launched)
        return launched

    def _whole_for(self, step: Step) -> CapturedDecodes | None:
        """Return the captured steps that run all of a step, or None."""
        whole = self._whole_decodes
        if whole is None or step.admissions:
            return None
        num_tokens = len(step.decode_rows) // 4
        if step.prefill_rows:
            each_is_sampled = step.prefill_samples == step.prefill_lengths  # as where tokens are verified
            if not (whole.verifies and each_is_sampled) or (self._prompts.rows and self._prompts.reads(step)):
                return None
            num_tokens += int(np.frombuffer(step.prefill_lengths, dtype=np.int32).sum())
        return whole if whole.fits(num_tokens) else None

    def _apply(self, step: Step) -> None:
        """Take in the changes of the step."""
        self._rows.apply(step)
        if step.admissions:
            self._admit(step.admissions)

    def _run(self, step: Step) -> LaunchedStep:
        """Run the step's batch."""
        batch = lay_out(step, self._rows.computed)
        masks = self._constraints.begin(batch.sample_rows_N) if self._constraints.rows else None
        wanted = self._prompts.wanted(step, batch) if self._prompts.rows else None
        inputs = self._rows.inputs(batch)
        tensors = inputs.planned(batch, self._attention, self._pool)
        if self._states is not None:
            tensors.states = StatesOfStep(self._states, batch.rows_B, batch.lengths_B, batch.query_lengths_B)
        prompts: tuple[PromptResult, ...] = ()
        if wanted is not None:
            logits_NV, prompts = self._forward_with_prompt_outputs(tensors, wanted)
        else:
            model = self._prefilling if step.prefill_rows else self._decoding
            logits_NV = model.forward(tensors)
        if not len(batch.sample_rows_N):
            # The step has only chunks in the middle of prompts: the K/V that they stored are its result.
            nothing = SampledTokens(logits_NV.new_empty(0, dtype=torch.int64), None)
            return self._returning(step.step_id, batch.sample_rows_N, nothing, prompts)
        rows_N, positions_N = batch.sample_rows_N, batch.sample_positions_N
        return self._sample(step.step_id, rows_N, positions_N, logits_NV, inputs.write_at_N, masks, prompts)

    def _run_whole(self, whole: CapturedDecodes, step: Step) -> LaunchedStep:
        """Run a step that is one call: every token samples."""
        # A sampled token's position is also its length: as many tokens come before it.
        rows_N, positions_N = sampled_places(step, self._rows.computed)
        masks = self._constraints.begin(rows_N) if self._constraints.rows else None
        variant = whole.variant_of(rows_N, positions_N) if masks is None else SamplingVariant.LOGITS
        decoded = whole.launch(rows_N, positions_N.astype(np.int32), variant)
        if decoded.token_ids_N is not None:
            sampled = SampledTokens(decoded.token_ids_N, None)
            return LaunchedStep(self._rank, step.step_id, rows_N, sampled, decoded.event, (), {})
        assert decoded.logits_NV is not None
        return self._sample(step.step_id, rows_N, positions_N, decoded.logits_NV, decoded.write_at_N, masks)

    def _sample(
        self,
        step_id: int,
        rows_N: npt.NDArray[np.int64],
        positions_N: npt.NDArray[np.int64],
        logits_NV: torch.Tensor,
        write_at_N: torch.Tensor,
        masks: PendingMasks | None,
        prompts: tuple[PromptResult, ...] = (),
    ) -> LaunchedStep:
        """Sample from the logits of a queued forward pass.  masks: computed while that runs."""
        ready = None if masks is None else masks.result()
        sampled = self._sampler.sample(logits_NV, rows_N, positions_N, ready)
        self._rows.write_sampled(write_at_N, sampled.token_ids_N)
        launched = self._returning(step_id, rows_N, sampled, prompts, {} if ready is None else ready.failures)
        if ready is not None:
            self._constraints.sampled(rows_N, launched.tokens)
        return launched

    def _admit(self, admissions: Sequence[Admission]) -> None:
        newcomers = [
            Newcomer(one.row, one.params, np.frombuffer(one.token_ids, dtype=np.int32), one.num_prompt_tokens)
            for one in admissions
        ]
        self._sampler.admit(newcomers, self._eos_token_ids)
        for admission, one in zip(admissions, newcomers, strict=True):
            params = one.params
            if self._constraints.rows or params.is_constrained:
                self._constraints.admit(one.row, params, one.token_ids, one.num_prompt_tokens)
            if self._prompts.rows or params.reads_prompt:
                self._prompts.admit(admission)

    def _forward_with_prompt_outputs(
        self, tensors: StepTensors, wanted: WantedStates
    ) -> tuple[torch.Tensor, tuple[PromptResult, ...]]:
        """Return logits_NV and the results of prompts, which need more rows than are sampled."""
        sample_at_N = tensors.sample_at_N
        num_sampled, more_at = len(sample_at_N), self._rows.upload(wanted.at_P)
        states = self._prefilling.hidden(tensors, torch.cat((sample_at_N, more_at)))
        prompts = wanted.read(states[num_sampled:], self._model)
        return self._model.logits(states[:num_sampled]), prompts

    def _returning(
        self,
        step_id: int,
        rows_N: npt.NDArray[np.int64],
        sampled: SampledTokens,
        prompts: tuple[PromptResult, ...],
        failures: dict[int, str] | None = None,
    ) -> LaunchedStep:
        if not self._on_cuda:
            return LaunchedStep(self._rank, step_id, rows_N, sampled, None, prompts, failures or {})
        host = sampled.to_host()
        host_prompts = tuple(one.to_host() for one in prompts)
        event = torch.cuda.Event()
        event.record()
        return LaunchedStep(self._rank, step_id, rows_N, host, event, host_prompts, failures or {})
