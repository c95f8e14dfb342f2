"""What stands in the LM head's place in a model that generates nothing: a classifier, two rows of the LM head, nothing.

Legend: N rows of normed states · D model dim · L labels
Owns: those products, whole on every rank, since they are small.  Does not know: how a prompt is pooled, requests.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import ClassifierShape, NoHeadShape, TokenScoreShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.part import Part
from engine.layers.weights import WeightSlice, parameter, whole


class PooledHead(Part, Protocol):
    """What makes logits of labels from the model's last states."""

    def __call__(self, states_ND: Tensor) -> Tensor:
        """[N, L] in float32."""
        ...


class NoHead:
    """The states are the result."""

    def __init__(
        self, shape: NoHeadShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        """See ``Part``."""

    def __call__(self, states_ND: Tensor) -> Tensor:
        return states_ND.float()

    def pack(self, kernels: LayerKernels | None) -> None:
        """See ``Part``."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """It reads nothing."""
        return iter(())


class Classifier(NoHead):
    """One row of weights for each label, without a bias."""

    def __init__(
        self, shape: ClassifierShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._name = shape.name
        self._weight_LD = parameter(shape.num_labels, hidden_size, device=device, dtype=dtype)

    def __call__(self, states_ND: Tensor) -> Tensor:
        return F.linear(states_ND, self._weight_LD).float()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this head reads from a checkpoint."""
        yield whole(f"{self._name}.weight", self._weight_LD)


class TokenScore(NoHead):
    """The logit of one token, less that of another: sigmoid makes of it what softmax makes of the two."""

    def __init__(
        self, shape: TokenScoreShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._weight_LD = parameter(len(shape.token_ids), hidden_size, device=device, dtype=dtype)

    def __call__(self, states_ND: Tensor) -> Tensor:
        yes_N, *no_N = F.linear(states_ND, self._weight_LD).float().unbind(1)
        return (yes_N - no_N[0] if no_N else yes_N)[:, None]

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """A row for each token, of what would be the LM head."""
        table = (self._shape.vocab_size, self._weight_LD.shape[1])
        for row, token_id in enumerate(self._shape.token_ids):
            target = self._weight_LD[row : row + 1]
            yield WeightSlice(f"{self._shape.name}.weight", table, 0, token_id, 1, target)
