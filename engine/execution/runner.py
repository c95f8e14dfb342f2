"""The runner: one rank's model, KV pool, host pool, rows and sampler, and how a step goes through them.

Owns: everything on the device.  Does not know: requests, text, actors; it knows rows.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.batch import decode_rows, lay_out
from engine.execution.captured_steps import CapturedDecodes, CapturedModel, Captures, Event
from engine.execution.host_pool import HostPool
from engine.execution.profiles import Profiles
from engine.execution.prompts import PromptOutputs, PromptResults, Prompts
from engine.execution.rows import DeviceRows
from engine.execution.stored_pages import StoredPages
from engine.host.timeouts import returns_within
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.messages import Admission, Step, StepDone, StepExtras
from engine.models.model import Model
from engine.sampling.captured import Variant
from engine.sampling.constraints import Constraints
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.state import Newcomer

log = logging.getLogger(__name__)

T = TypeVar("T")

# Less than placement.silence_timeout_s is by default: the event loop of an executor that has failed waits for this.
LEAVE_TIMEOUT_S = 5.0


def extras_by_row(**columns: Mapping[int, Any]) -> dict[int, StepExtras]:
    """Row -> its extras, from one mapping of rows for each field."""
    rows = {row for values in columns.values() for row in values}
    return {row: StepExtras(**{name: of[row] for name, of in columns.items() if row in of}) for row in sorted(rows)}


@dataclass(slots=True)
class LaunchedStep:
    """A step whose kernels are queued.  rows_N: those that sample.  event: recorded behind its copies to the host; None
    on CPU.  prompts: what it gives of them.  failures: index into N -> why there is no token.  note: ``StepDone``'s."""

    rank: int
    step_id: int
    rows_N: npt.NDArray[np.int64]
    sampled: SampledTokens
    event: Event | None
    prompts: PromptResults | None
    failures: dict[int, str]
    note: str = ""

    def ready(self) -> bool:
        """Whether the device is done with it."""
        return self.event is None or self.event.query()

    def collect(self) -> StepDone:
        """Wait for the device; the tokens as bytes."""
        token_ids = self.tokens().astype(np.int32, copy=False).tobytes()
        extras = extras_by_row(
            **(self.sampled.logprobs.by_row(self.rows_N) if self.sampled.logprobs is not None else {}),
            prompt_logprobs=self.prompts.prompt_logprobs() if self.prompts is not None else {},
            pooled=self.prompts.pooled_bytes() if self.prompts is not None else {},
            failure=self._by_row(self.failures),
        )
        return StepDone(rank=self.rank, step_id=self.step_id, token_ids=token_ids, extras=extras, note=self.note)

    def _by_row(self, by_index: dict[int, T]) -> dict[int, T]:
        return {int(self.rows_N[index]): value for index, value in by_index.items()}

    def tokens(self) -> npt.NDArray[np.int64]:
        """Wait for the device; int64[N].  From any thread."""
        if self.event is not None:
            self.event.synchronize()
        return self.sampled.token_ids_N.numpy()


class ModelRunner:
    """Runs steps in the order they come; all calls from one thread.

    graphs: what captures on the device.  host_pool: None if there is no host tier.  stored: None if there is no store.
    piecewise: None if steps with prefill run as any other.  whole_decodes: None if decode steps do.
    """

    def __init__(
        self,
        *,
        comm: Comm,
        graphs: Captures,
        model: Model,
        pool: KVPool,
        host_pool: HostPool | None,
        stored: StoredPages | None,
        attention: AttentionBackend,
        piecewise: CapturedModel | None,
        whole_decodes: CapturedDecodes | None,
        rows: DeviceRows,
        constraints: Constraints,
        sampler: Sampler,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.num_pages = pool.num_pages
        self._rank = comm.rank
        self._comm = comm
        self._graphs = graphs
        self._pool = pool
        self._host_pool = host_pool
        self.stored = stored
        self._attention = attention
        self._model = model
        self._whole_decodes = whole_decodes
        self._prefilling: Model | CapturedModel = model if piecewise is None else piecewise
        # Where nothing runs a whole step, the model between attention calls is better than nothing.
        captured = piecewise is not None and piecewise.captured and whole_decodes is None
        self._decoding = self._prefilling if captured else model
        self._rows = rows
        self._constraints = constraints
        self._prompts = Prompts()
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._on_cuda = pool.data.device.type == "cuda"
        self._profiles = Profiles(comm.rank)
        self.profile = self._profiles.begin

    def leave(self) -> None:
        """See ``Runner``.  On a thread that is left behind if a library does not return."""
        if not returns_within(LEAVE_TIMEOUT_S, self._leave, f"rank {self._rank} leaves"):
            log.error("rank %d is not out of its group after %g s; its process must end", self._rank, LEAVE_TIMEOUT_S)

    def _leave(self) -> None:
        if self.stored is not None:
            self.stored.close(timeout_s=0.0)
        # Graphs first, whoever refers to them: NCCL lets go of no communicator while one holds a collective of it.
        for part in (self._graphs.discard, self._comm.close):
            try:
                part()
            except Exception:
                log.exception("rank %d has failed, and then to leave its group", self._rank)

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Queue one forward pass and its sampling.

        Raises MemoryError if the device has no room for it.  What the step changes has then been taken in, and its
        batch has not run: it may be launched again by itself, whole or in parts."""
        whole = self._whole_for(step)
        if whole is None:
            self._apply(step)
        else:
            self._transfer(step)
            self._settle()  # what runs whole waits for no layer
            whole.tell(step)
        computed = self._rows.computed.copy()
        try:
            with self._profiles.step(step.step_id) if self._profiles.recording else nullcontext():
                return self._run(step) if whole is None else self._launch_whole(whole, step)
        except (MemoryError, torch.OutOfMemoryError) as error:  # the first from kernels in C
            if self._prompts.sums_in(step):
                raise RuntimeError(f"no room for a step that adds to sums, and so cannot run twice: {error}") from error
            self._rows.restore(computed)
            raise MemoryError(str(error)) from None

    def _whole_for(self, step: Step) -> CapturedDecodes | None:
        """What runs all of a step, if it can."""
        whole = self._whole_decodes
        if whole is None or step.prefill_rows or step.admissions or not whole.fits(len(step.decode_rows) // 4):
            return None
        return whole

    def _apply(self, step: Step) -> None:
        """Take in what the step changes."""
        self._transfer(step)
        self._rows.apply(step)
        if step.admissions:
            self._admit(step.admissions)

    def _settle(self) -> None:
        if self._host_pool is not None:
            self._host_pool.settle()

    def _transfer(self, step: Step) -> None:
        self._settle()  # what the step before has not waited for
        if self.stored is not None:
            self.stored.save(step)
        if step.transfer_to_host:
            assert self._host_pool is not None, f"step {step.step_id} moves pages and there is no host tier"
            self._host_pool.apply(step)
        if self.stored is not None:
            self.stored.land(step)

    def _run(self, step: Step) -> LaunchedStep:
        """The step's batch."""
        batch = lay_out(step, self._rows.computed)
        masks = self._constraints.begin(batch.sample_rows_N) if self._constraints.rows else None
        wanted = self._prompts.wanted(step, batch) if self._prompts.rows else None
        inputs = self._rows.inputs(batch)
        tensors = inputs.planned(batch, self._attention, self._pool)
        prompts = None
        if wanted is not None:
            logits_NV, prompts = self._forward_with_prompt_outputs(tensors, wanted)
        else:
            model = self._prefilling if step.prefill_rows else self._decoding
            logits_NV = model.forward(tensors)
        if not len(batch.sample_rows_N):
            # Only chunks in the middle of prompts: the K/V they stored are the step's result.
            nothing = SampledTokens(logits_NV.new_empty(0, dtype=torch.int64), None)
            return self._returning(step.step_id, batch.sample_rows_N, nothing, prompts)
        # Asked for only now: the forward pass is queued, and runs while they are computed.
        ready = None if masks is None else masks.result()
        sampled = self._sampler.sample(logits_NV, batch.sample_rows_N, batch.sample_positions_N, ready)
        self._rows.write_sampled(inputs.write_at_N, sampled.token_ids_N)
        failures = {} if ready is None else ready.failures
        launched = self._returning(step.step_id, batch.sample_rows_N, sampled, prompts, failures)
        if ready is not None:
            self._constraints.sampled(batch.sample_rows_N, launched.tokens)
        return launched

    def _launch_whole(self, whole: CapturedDecodes, step: Step) -> LaunchedStep:
        """A step that is one call: every row samples."""
        rows_N = decode_rows(step)
        computed = self._rows.computed
        computed[rows_N] += 1
        lengths_N = computed[rows_N]  # the sampled token's position as well: as many tokens come before it
        masks = self._constraints.begin(rows_N) if self._constraints.rows else None
        positions_N = lengths_N.astype(np.int64)
        variant = whole.variant_of(rows_N, positions_N) if masks is None else Variant.LOGITS
        decoded = whole.launch(rows_N, lengths_N, variant)
        if decoded.token_ids_N is not None:
            sampled = SampledTokens(decoded.token_ids_N, None)
            return LaunchedStep(self._rank, step.step_id, rows_N, sampled, decoded.event, None, {})
        assert decoded.logits_NV is not None
        ready = None if masks is None else masks.result()
        sampled = self._sampler.sample(decoded.logits_NV, rows_N, positions_N, ready)
        self._rows.write_sampled(decoded.write_at_N, sampled.token_ids_N)
        launched = self._returning(step.step_id, rows_N, sampled, None, {} if ready is None else ready.failures)
        if ready is not None:
            self._constraints.sampled(rows_N, launched.tokens)
        return launched

    def _admit(self, admissions: Sequence[Admission]) -> None:
        newcomers = [
            Newcomer(one.row, one.params, np.frombuffer(one.token_ids, dtype=np.int32), one.num_prompt_tokens)
            for one in admissions
        ]
        self._sampler.admit_all(newcomers, self._eos_token_ids)
        for admission, one in zip(admissions, newcomers, strict=True):
            params = one.params
            if self._constraints.rows or params.grammar is not None or params.limits_tokens:
                self._constraints.admit(one.row, params, one.token_ids, one.num_prompt_tokens)
            if self._prompts.rows or params.prompt_logprobs is not None or params.pooling:
                self._prompts.admit(admission)

    def _forward_with_prompt_outputs(
        self, tensors: StepTensors, wanted: PromptOutputs
    ) -> tuple[torch.Tensor, PromptResults]:
        """logits_NV and what is wanted of prompts, which are more rows than are sampled."""
        sample_at_N = tensors.sample_at_N
        more_at = self._rows.upload(np.concatenate((wanted.scored_at_E, wanted.pooled_at_P)))
        num_sampled, num_scored = len(sample_at_N), len(wanted.scored_at_E)
        states = self._prefilling.hidden(tensors, torch.cat((sample_at_N, more_at)))
        scored_ED, pooled_PD = states[num_sampled:].split((num_scored, len(wanted.pooled_at_P)))
        prompts = self._prompts.results(wanted, scored_ED, pooled_PD, self._model)
        return self._model.logits(states[:num_sampled]), prompts

    def _returning(
        self,
        step_id: int,
        rows_N: npt.NDArray[np.int64],
        sampled: SampledTokens,
        prompts: PromptResults | None,
        failures: dict[int, str] | None = None,
    ) -> LaunchedStep:
        if not self._on_cuda:
            return LaunchedStep(self._rank, step_id, rows_N, sampled, None, prompts, failures or {})
        host = sampled.to_host()
        host_prompts = None if prompts is None else prompts.to_host()
        event = torch.cuda.Event()
        event.record()
        return LaunchedStep(self._rank, step_id, rows_N, host, event, host_prompts, failures or {})
