"""Steps of the whole model without requests, which are measured at start.

Legend: T new tokens of the step · B its sequences · N rows that are sampled
Owns: the inputs of a step, all of the dump page.  Does not know: why it is run, clocks.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.graphs.rank import StepParts
from engine.layers.attention import AttentionBatch
from engine.layers.states import StatesOfStep
from engine.layers.step import StepTensors
from engine.sampling.state import Newcomer
from engine.types.params import SamplingParams

Int32 = npt.NDArray[np.int32]


class ModelSteps:
    """Steps of free rows, whose states they change; of the pool they read and write only the dump page."""

    def __init__(self, parts: StepParts) -> None:
        self._model = parts.model
        self._pool = parts.pool
        self._attention = parts.attention
        self._sampler = parts.sampler
        self._states = parts.states

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return self._states is not None

    @torch.inference_mode()
    def run(
        self, lengths_B: Int32, queries_B: Int32, num_sampled: int, params: SamplingParams, num_rows: int = 0
    ) -> None:
        """Run a step.  lengths_B: context including new tokens.  queries_B: new tokens; all 1 in a decode step.
        num_rows: rows of the sampler, which have several samples each if these are more; 0 for one sample each."""
        pool, device = self._pool, self._pool.data.device
        num_sequences, num_tokens = len(queries_B), int(queries_B.sum())
        starts = np.concatenate(([0], queries_B.cumsum())).astype(np.int32)
        width = -(-int(lengths_B.max()) // pool.page_size)
        self._attention.plan_step(
            AttentionBatch(
                num_decodes=num_sequences if num_tokens == num_sequences else 0,
                page_table_BP=torch.full((num_sequences, width), pool.dump_page, dtype=torch.int32, device=device),
                lengths_B=torch.from_numpy(lengths_B).to(device),
                query_starts_B1=torch.from_numpy(starts).to(device),
                host_lengths=lengths_B,
                host_query_lengths=queries_B,
            )
        )
        at_N = np.arange(num_sampled)
        rows_N = at_N % (num_rows or num_sampled)
        for row in np.unique(rows_N).tolist():
            self._sampler.admit((Newcomer(row, params, np.zeros(1, dtype=np.int32), 1),), ())
        states = None
        if self._states is not None:
            states = StatesOfStep(self._states, np.arange(num_sequences), lengths_B, queries_B)
        zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        logits_NV = self._model.forward(
            StepTensors(
                token_ids_T=zeros_T,
                positions_T=zeros_T,
                slots_T=zeros_T + pool.dump_page * pool.page_stride,
                sample_at_N=torch.from_numpy(at_N).to(device),
                attention=self._attention,
                pool=pool,
                states=states,
            )
        )
        self._sampler.sample(logits_NV, rows_N, np.ones(num_sampled, dtype=np.int64))
