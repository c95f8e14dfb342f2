"""A head next to the model: the states of the model's steps that it reads, and its passes.

Legend: T tokens of a pass · N of them after which a token is guessed · D model dim · V tokens that the head can guess
Owns: the states, by page; the head's passes.  Does not know: how a head computes, which rows are drafted for.

Each step of the model leaves the fused states of its tokens next to their keys and values, in a pool with as many
pages.  So the head computes only when tokens are drafted, as a draft model does, and finds the states of prefixes that
other requests have computed.

At position i it reads the state there and token i + 1, and guesses token i + 2: one place ahead of a model.  For
further guesses, the state of a position is the one that the head has computed at the position before.  It is written
where the model will write the true one when it verifies the guess; the head then computes the position once more.
"""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.execution.rows import DeviceRows
from engine.features.speculation.drafting import Drafted, Drafter
from engine.features.speculation.head_model import StatesHead
from engine.features.speculation.messages import Proposals
from engine.layers.attention import AttentionBackend
from engine.layers.kv_pool import KVPool
from engine.layers.step import StepTensors
from engine.messages import Step


class KeptStates:
    """The fused states of all tokens in the pages of a pool, which the model's tap stores.

    pool: a pool of one layer, which holds the states as latents.  layers: layers of the model."""

    def __init__(self, head: StatesHead, pool: KVPool, layers: Sequence[int]) -> None:
        self.layers: Collection[int] = layers
        self.pool = pool
        self._head = head

    def keep(self, states: Sequence[Tensor], step: StepTensors) -> None:
        """Keep the states of a step's tokens."""
        self.store(self._head.fused(states), self._slots(step))

    def store(self, states_TD: Tensor, slots_T: Tensor) -> None:
        """Store states.  slots_T: slots of ``pool``."""
        self.pool.store_latents(0, states_TD[:, None], slots_T)

    def read(self, slots_T: Tensor) -> Tensor:
        """Return states, [T, D], a copy."""
        return self.pool.keys(0).index_select(0, slots_T).flatten(1)

    def _slots(self, step: StepTensors) -> Tensor:
        """Return the slots here of a step's tokens, whose slots are those of the model's pool."""
        stride, size = step.pool.page_stride, self.pool.page_size
        slots_T = step.slots_T
        if stride == size:
            return slots_T
        return slots_T.div(stride, rounding_mode="floor") * size + slots_T % stride


class HeadDrafter(Drafter):
    """A drafter that has a head.

    rows: the model's rows.
    to_model_V: int64, the model's token of each of the head's; None if they are the same."""

    def __init__(
        self,
        head: StatesHead,
        pool: KVPool,
        attention: AttentionBackend,
        rows: DeviceRows,
        *,
        states: KeptStates,
        to_model_V: Tensor | None,
        num_tokens: int,
        most_tokens: int,
    ) -> None:
        super().__init__(
            head,
            pool,
            attention,
            rows,
            vocab_size=head.vocab_size,
            num_tokens=num_tokens,
            most_tokens=most_tokens,
            ahead=1,
        )
        self._head = head
        self._states = states
        self._to_model_V = to_model_V

    def draft(self, step: Step, proposals: Proposals) -> Drafted:
        """Draft for the places that the proposals name, one position earlier than a model does."""
        rows_K, positions_K, _ = proposals.columns()
        positions_K = positions_K - 1
        drafted = super().draft(step, msgspec.structs.replace(proposals, positions=positions_K.tobytes()))
        if proposals.counted:
            return drafted
        # Results after the last known token are from states of the head's own, and do not count.
        rows_B, first_B = np.unique(rows_K, return_index=True)
        computed = self._rows.computed
        computed[rows_B] = np.minimum(computed[rows_B], positions_K[first_B])
        return drafted

    def _most_lacking(self) -> int:
        """Return how many tokens a row lacks at most: the drafted ones do not count, as their states were guessed."""
        return self._num_tokens + 1

    def _lacking(self, counts_B: Tensor, right_B: Tensor) -> Tensor:
        """Return how many tokens rows lack next: all new ones."""
        return right_B + 1

    def _guess(self, tensors: StepTensors, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Run one forward pass; each guessed token gets a state as well."""
        x_ND = self._head.hidden(tensors, tensors.sample_at_N)
        if not len(rows_N):
            return rows_N
        tokens_N = self._head.logits(x_ND).argmax(-1)
        pages_RP, size = self._rows.pages_RP, self._pool.page_size
        page_at_N = rows_N.clamp(min=0) * pages_RP.shape[1] + positions_N.div(size, rounding_mode="floor")
        page_N = torch.where(rows_N < 0, self._pool.dump_page, pages_RP.view(-1).index_select(0, page_at_N))
        self._states.store(x_ND, page_N * size + positions_N % size)
        return tokens_N if self._to_model_V is None else self._to_model_V.index_select(0, tokens_N)
