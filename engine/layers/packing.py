"""Kernels of linear layers: a kernel lays a loaded weight out in its own layout and multiplies by it.

Legend: T rows of the input · I input features · O output features
Owns: the protocols.  Does not know: layers, kernels, files.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

# Relative to a weight's norm: half of what float32 rounds each element by.
EXACT = 2.0**-25
ROWS_AT_ONCE = 256


class PackedWeight(Protocol):
    """A weight in its kernel's layout.  nbytes: memory that it takes."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + bias, [T, O] in the dtype of x.  x may have no rows and any strides, and is not changed."""


@runtime_checkable
class WrappedWeight(Protocol):
    """A packed weight that adds something to the product of another one in some steps.  plain: the other one."""

    @property
    def plain(self) -> PackedWeight: ...


@runtime_checkable
class LinearKernel(Protocol):
    """Lays weights out for their products.  element_bytes: memory per element, to plan by."""

    @property
    def element_bytes(self) -> float: ...

    def pack(self, weight_OI: Tensor) -> PackedWeight | None:
        """Return the weight in the kernel's layout, in its own memory: the weight's is freed.

        None if torch should multiply by the weight as it is.  Called once per weight, after loading.
        """


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Consecutive rows of a weight as their file stores them.  where: file and tensor, for errors.

    format: name of the blocks, as ggml has it.  blocks: uint8, [O, bytes of a row].  inputs: elements of a row."""

    where: str
    format: str
    blocks: Tensor
    inputs: int


@runtime_checkable
class RowKeeper(Protocol):
    """A linear kernel that multiplies by rows as they are stored, so that they are never floats in memory.

    reads_rows: whether its weights are ``RowWeight``, so that it may keep an embedding too."""

    @property
    def reads_rows(self) -> bool: ...

    def keep(self, target: Tensor, rows: StoredRows) -> bool:
        """Take the rows for the weight that ``target`` is a part of, until ``pack`` is called for that weight; then
        ``target`` need not be filled.  Return False if the kernel does not multiply by rows of this format."""
        ...

    def keeps(self, weight_OI: Tensor) -> bool:
        """Return whether all rows of the weight were taken."""
        ...


@runtime_checkable
class RowWeight(Protocol):
    """A packed weight whose rows can be read, as those of an embedding are."""

    def rows(self, outputs_T: Tensor) -> Tensor:
        """Return these rows, [T, I], a new tensor of float32."""
        ...


@runtime_checkable
class HeadKernel(Protocol):
    """A kernel that rounds the weights of layers and has another, nearly exact one for the LM head."""

    @property
    def head(self) -> LinearKernel: ...


@dataclass(frozen=True, slots=True)
class Linears:
    """The kernels of a model.  layers: for the decoder's layers.  head: for the LM head, nearly exact.

    exact: with invariant numerics, for products that are never rounded, which torch computes otherwise."""

    layers: LinearKernel
    head: LinearKernel
    exact: LinearKernel | None = None


def fits_float16(weight_OI: Tensor, exactly: bool) -> bool:
    """Return whether float16 can hold every element; if ``exactly``, also whether it loses less than float32 rounds."""
    allowed = EXACT * float(weight_OI.norm()) if exactly else float("inf")
    lost = 0.0
    for rows_OI in weight_OI.split(ROWS_AT_ONCE):  # weights that do not fit show it in their first rows
        lost += float(rows_OI.half().sub(rows_OI).square().sum())  # in float32; infinite beyond the range
        if not lost < float("inf") or lost > allowed**2:
            return False
    return True
