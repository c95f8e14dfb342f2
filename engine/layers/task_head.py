"""The head of a model that generates nothing, in place of an LM head: a classifier, a reward, two rows, or nothing.

Legend: N rows of normed states · D model dim · L labels · R rows of the weight
Owns: those products, whole on every rank, since they are small.  Does not know: how a prompt is pooled, requests.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.shape import ClassifierShape, NoHeadShape, RewardShape, TokenScoreShape
from engine.layers.comm import Comm
from engine.layers.kernels import LayerKernels
from engine.layers.packing import LinearKernel
from engine.layers.weights import WeightSlice, parameter, whole


class TaskHead:
    """A head for a task without output, with a plain weight of R rows: so few rows gain nothing by another layout."""

    def __init__(self, rows: int, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = parameter(rows, hidden_size, device=device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes

    def labels(self, states_ND: Tensor) -> Tensor:
        """Return logits [N, L] in float32."""
        return F.linear(states_ND, self.weight).float()

    def logits(self, x_ND: Tensor, as_float32: bool = True) -> Tensor:
        """Return [N, 1] zeros: the only choice, as nothing is generated; NaN where the row is not finite."""
        return (x_ND.float() * 0.0).sum(dim=1, keepdim=True)

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Return nothing: there is no weight."""
        return iter(())

    def pack(self, kernel: LinearKernel | LayerKernels | None, keep_weight: bool = False) -> None:
        """Do nothing."""


class NoHead(TaskHead):
    """No head: the states are the result."""

    def __init__(
        self, shape: NoHeadShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(0, hidden_size, device, dtype)


class Classifier(TaskHead):
    """One row of weights for each label, without a bias."""

    def __init__(
        self, shape: ClassifierShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape.num_labels, hidden_size, device, dtype)
        self._name = shape.name

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the whole weight."""
        yield whole(f"{self._name}.weight", self.weight)


class Reward(TaskHead):
    """An MLP of two products, whose ``weight`` is the second one's."""

    def __init__(
        self, shape: RewardShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(1, hidden_size, device, dtype)
        self._shape = shape
        self._bias = parameter(1, device=device, dtype=dtype)
        self._inner = parameter(hidden_size, hidden_size, device=device, dtype=dtype)
        self._inner_bias = parameter(hidden_size, device=device, dtype=dtype)

    def labels(self, states_ND: Tensor) -> Tensor:
        """Return one logit per row, [N, 1] in float32."""
        inner_ND = F.linear(states_ND, self._inner, self._inner_bias).relu_()
        return F.linear(inner_ND, self.weight, self._bias).float()

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield the weights and biases of both products."""
        yield whole(f"{self._shape.inner}.weight", self._inner)
        yield whole(f"{self._shape.inner}.bias", self._inner_bias)
        yield whole(f"{self._shape.out}.weight", self.weight)
        yield whole(f"{self._shape.out}.bias", self._bias)


class TokenScore(TaskHead):
    """The logit of one token minus that of another: its sigmoid is the softmax over the two."""

    def __init__(
        self, shape: TokenScoreShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(len(shape.token_ids), hidden_size, device, dtype)
        self._shape = shape

    def labels(self, states_ND: Tensor) -> Tensor:
        logits_NR = super().labels(states_ND) * self._shape.scale
        if cap := self._shape.cap:
            logits_NR = logits_NR.div_(cap).tanh_().mul_(cap)
        yes_N, *no_N = logits_NR.unbind(1)
        return (yes_N - no_N[0] if no_N else yes_N)[:, None]

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Yield a row of the LM head's table for each token."""
        table = (self._shape.vocab_size, self.weight.shape[1])
        for row, token_id in enumerate(self._shape.token_ids):
            target = self.weight[row : row + 1]
            yield WeightSlice(f"{self._shape.name}.weight", table, 0, token_id, 1, target)
