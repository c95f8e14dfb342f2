"""Drives a model step by step without an engine: it makes pages, slots and batches from plain lists of tokens.

Owns: the translation of (sequence, tokens) pairs into StepTensors, with pages assigned in shuffled order.
Does not know: the scheduler, sampling, graphs.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.layers.mixed_attention import build_attention
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.step import StepTensors
from engine.models.decoder import Decoder
from engine.models.model import Model
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.support.paging import new_pool

MAX_SEQUENCES = 16


@dataclass
class SampleSequence:
    """A sequence: its tokens that are in the pool already, and their pages."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Driver:
    """A pool and recurrent states full of NaN, a backend, and named sequences: any number without such states."""

    def __init__(self, model: Model, page_size: int = 16, num_pages: int = 64, shuffled: bool = True) -> None:
        spec = model.attention_spec
        device = torch.device("cpu")
        self.model = model
        self.pool = new_pool(spec, num_pages, page_size, model.dtype, device)
        self.pool.data.fill_(torch.nan)  # A read of an unwritten slot shows up.
        self.states: RecurrentStates | None = None
        if isinstance(model, Decoder) and (layers := model.shape.states_of_rank(model.embedding.comm.size)):
            self.states = RecurrentStates(layers, MAX_SEQUENCES, device)
            self.states.data.fill_(torch.nan)
        self.attention: AttentionBackend = build_attention(TorchAttention, spec, self.pool)
        order = np.random.default_rng(0).permutation(num_pages) if shuffled else np.arange(num_pages)[::-1]
        self.free = [int(page) for page in order]
        self.sequences: dict[str, SampleSequence] = {}

    def step(self, new_tokens: dict[str, list[int]], rows: Literal["all", "last", "none"] = "all") -> dict[str, Tensor]:
        """Run one step; returns logits of all new tokens of each sequence, of the last one, or of none.

        Sequences with one new token go first, as decodes.
        """
        names = sorted(new_tokens, key=lambda name: len(new_tokens[name]) != 1)
        for name in names:
            self._append(self.sequences.setdefault(name, SampleSequence()), new_tokens[name])
        counts = [len(new_tokens[name]) for name in names]
        ends = np.cumsum(counts)
        sampled = {"all": np.arange(ends[-1]), "last": ends - 1, "none": ends[:0]}[rows]
        with torch.inference_mode():
            logits_NV = self.model.forward(self._tensors(names, new_tokens, counts, sampled))
        parts = torch.split(logits_NV, {"all": counts, "last": [1] * len(names), "none": [0] * len(names)}[rows])
        return dict(zip(names, parts, strict=True))

    def _append(self, sequence: SampleSequence, tokens: list[int]) -> None:
        sequence.tokens += tokens
        while len(sequence.pages) * self.pool.page_size < len(sequence.tokens):
            sequence.pages.append(self.free.pop())

    def _tensors(
        self, names: list[str], new_tokens: dict[str, list[int]], counts: list[int], sampled: npt.NDArray[np.int64]
    ) -> StepTensors:
        page_size = self.pool.page_size
        sequences = [self.sequences[name] for name in names]
        lengths = np.array([len(one.tokens) for one in sequences], dtype=np.int32)
        positions = [np.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        slots = [
            np.array(one.pages)[place // page_size] * page_size + place % page_size
            for one, place in zip(sequences, positions, strict=True)
        ]
        table = np.zeros((len(names), max(len(one.pages) for one in sequences)), dtype=np.int32)
        for row, one in enumerate(sequences):
            table[row, : len(one.pages)] = one.pages
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.attention.plan_step(
            AttentionBatch(
                num_decodes=sum(count == 1 for count in counts),
                page_table_BP=torch.from_numpy(table),
                lengths_B=torch.from_numpy(lengths),
                query_starts_B1=torch.from_numpy(starts),
                host_lengths=lengths,
                host_query_lengths=np.array(counts, dtype=np.int32),
            )
        )
        states = None
        if self.states is not None:
            known = list(self.sequences)
            rows = np.array([MAX_SEQUENCES - 1 - known.index(name) for name in names])
            states = StatesOfStep(self.states, rows, lengths, np.array(counts, dtype=np.int32))
        return StepTensors(
            token_ids_T=torch.tensor([token for name in names for token in new_tokens[name]]),
            positions_T=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
            slots_T=torch.from_numpy(np.concatenate(slots).astype(np.int64)),
            sample_at_N=torch.from_numpy(sampled.astype(np.int64)),
            attention=self.attention,
            pool=self.pool,
            states=states,
        )
