"""The runner: one rank's model, KV pool, host pool, rows and sampler, and how a step goes through them.

Owns: everything on the device.  Does not know: requests, text, actors; it knows rows.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.execution.batch import lay_out
from engine.execution.rows import DeviceRows
from engine.kv.host_pool import HostPool
from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.layers.step import StepTensors
from engine.messages import Step, StepDone
from engine.models.decoder import Decoder
from engine.sampling.sampler import SampledTokens, Sampler


@dataclass(slots=True)
class LaunchedStep:
    """A step whose kernels are queued.  event: recorded behind its copies to the host; None on CPU."""

    rank: int
    step_id: int
    sampled: SampledTokens
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        """Whether the device is done with it."""
        return self.event is None or self.event.query()

    def collect(self) -> StepDone:
        """Wait for the device; the tokens as bytes."""
        if self.event is not None:
            self.event.synchronize()
        return StepDone(
            rank=self.rank,
            step_id=self.step_id,
            token_ids=self.sampled.token_ids_N.numpy().astype(np.int32, copy=False).tobytes(),
            logprobs=self.sampled.logprobs.messages() if self.sampled.logprobs is not None else {},
        )


class ModelRunner:
    """Runs steps in the order they come; all calls from one thread.  host_pool: None if there is no host tier."""

    def __init__(
        self,
        *,
        rank: int,
        model: Decoder,
        pool: KVPool,
        host_pool: HostPool | None,
        attention: AttentionBackend,
        rows: DeviceRows,
        sampler: Sampler,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.num_pages = pool.num_pages
        self._rank = rank
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._attention = attention
        self._rows = rows
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._on_cuda = pool.data.device.type == "cuda"

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Queue one forward pass and its sampling."""
        if step.transfer_to_host:
            assert self._host_pool is not None, f"step {step.step_id} moves pages and there is no host tier"
            self._host_pool.apply(step)
        self._rows.apply(step)
        for admission in step.admissions:
            self._sampler.admit(
                admission.row,
                admission.params,
                np.frombuffer(admission.token_ids, dtype=np.int32),
                admission.num_prompt_tokens,
                self._eos_token_ids,
            )
        batch = lay_out(step, self._rows.computed)
        inputs = self._rows.inputs(batch)
        self._attention.begin(
            AttentionBatch(
                num_decodes=batch.num_decodes,
                page_table_BP=inputs.page_table_BP,
                lengths_B=inputs.lengths_B,
                query_starts_B1=inputs.query_starts_B1,
                host_lengths=batch.lengths_B,
                host_query_lengths=batch.query_lengths_B,
            )
        )
        logits_NV = self._model.forward(
            StepTensors(
                token_ids_T=inputs.token_ids_T,
                positions_T=inputs.positions_T,
                slots_T=inputs.slots_T,
                sample_at_N=inputs.sample_at_N,
                attention=self._attention,
                pool=self._pool,
            )
        )
        if not len(batch.sample_rows_N):
            # Only chunks in the middle of prompts: the K/V they stored are the step's whole result.
            return self._returning(step.step_id, SampledTokens(logits_NV.new_empty(0, dtype=torch.int64), None))
        sampled = self._sampler.sample(logits_NV, batch.sample_rows_N, batch.sample_positions_N)
        self._rows.write_sampled(inputs.write_at_N, sampled.token_ids_N)
        return self._returning(step.step_id, sampled)

    def _returning(self, step_id: int, sampled: SampledTokens) -> LaunchedStep:
        if not self._on_cuda:
            return LaunchedStep(self._rank, step_id, sampled, None)
        host = sampled.to_host()
        event = torch.cuda.Event()
        event.record()
        return LaunchedStep(self._rank, step_id, host, event)
