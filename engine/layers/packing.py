"""The kernels behind a linear layer's product: one lays a loaded weight out, and multiplies by it.

Legend: T rows of the input · I input features · O output features
Owns: the protocols.  Does not know: layers, kernels, files.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

# Of a weight's norm: half of what float32 rounds each element by.
EXACT = 2.0**-25


class PackedWeight(Protocol):
    """A weight as its kernel keeps it.  nbytes: memory that it takes."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias: [T, O] in the dtype of x, which may have no rows and any strides, and is not changed."""


@runtime_checkable
class WrappedWeight(Protocol):
    """A packed weight that adds something to the product of another one in some steps.  plain: the other one."""

    @property
    def plain(self) -> PackedWeight: ...


@runtime_checkable
class LinearKernel(Protocol):
    """Lays weights out for their products.  element_bytes: what it keeps of each element, to plan memory by."""

    @property
    def element_bytes(self) -> float: ...

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in the kernel's layout, which must not share its memory: that is freed.

        None to have it multiplied as it is, by torch.  Called once per weight, after loading.
        """


@runtime_checkable
class HeadKernel(Protocol):
    """A kernel that rounds the weights of layers, and has one for the LM head that loses next to nothing."""

    @property
    def head(self) -> LinearKernel: ...


@dataclass(frozen=True, slots=True)
class Linears:
    """The kernels of a model.  layers: of the decoder's layers.  head: of the LM head, nearly exact."""

    layers: LinearKernel
    head: LinearKernel


def fits_float16(weight_OI: Tensor, exactly: bool) -> bool:
    """Whether float16 has a number for every element; exactly: and loses less than a float32 product rounds by."""
    lost = weight_OI.half().sub(weight_OI).norm()  # in float32; infinite beyond the range
    return bool(lost.isfinite()) and not (exactly and lost > EXACT * weight_OI.norm())
