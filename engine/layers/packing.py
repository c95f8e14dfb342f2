"""What stands behind a linear layer's product: a kernel lays a loaded weight out, and multiplies by it.

Legend: T rows of the input · I input features · O output features
Owns: the protocols.  Does not know: layers, kernels, files.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


class PackedWeight(Protocol):
    """A weight as its kernel keeps it.  nbytes: memory that it takes."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias: [T, O] in the dtype of x, which may have no rows and any strides, and is not changed."""


@runtime_checkable
class LinearKernel(Protocol):
    """Lays weights out for their products.  element_bytes: what it keeps of each element, to plan memory by."""

    @property
    def element_bytes(self) -> float: ...

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in the kernel's layout, which must not share its memory: that is freed.

        None to have it multiplied as it is, by torch.  Called once per weight, after loading.
        """


@dataclass(frozen=True, slots=True)
class Linears:
    """The kernels of a model.  layers: of the decoder's layers.  head: of the LM head, which is never rounded."""

    layers: LinearKernel
    head: LinearKernel
