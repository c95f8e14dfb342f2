"""The MLP of Arcee.  Legend: T new tokens in the step · D model dim"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from callboard.plugins import ColumnLinear, Comm, LayerKernels, RowLinear, WeightSlice
from callboard_arcee.family import SquaredShape


class SquaredMLP:
    """down(relu(up(x))^2), cut over ranks between the two products."""

    def __init__(
        self, shape: SquaredShape, hidden_size: int, comm: Comm, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.up = ColumnLinear(hidden_size, [("up_proj", shape.intermediate_size)], shape.bias, comm, device, dtype)
        self.down = RowLinear(shape.intermediate_size, hidden_size, shape.bias, comm, device, dtype)
        self.linears = (self.up, self.down)

    def __call__(self, x_TD: Tensor, kernels: LayerKernels | None) -> Tensor:
        return self.down(F.relu(self.up(x_TD)).square_())

    def pack(self, kernels: LayerKernels | None) -> None:
        """Nothing to prepare beside the linear layers."""

    def slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What this part reads from a checkpoint."""
        yield from self.up.slices(f"{prefix}.mlp")
        yield from self.down.slices(f"{prefix}.mlp.down_proj")
