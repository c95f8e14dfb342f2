"""The protocol of what recurrent layers compute between their products, for tensors of one device.

Legend: T new tokens of a step · C channels of a convolution · K taps, or size of a key · V size of a value
        G heads with a key · H heads with a value · S slots · I numbers of all values
Owns: its operations.  Does not know: what computes them: torch, C or Triton.

Operands of a token may be columns of a wider tensor: their rows are any distance apart, their numbers lie together.
States are float32.  Rows of a step, their slots, and which of them begin are in the step.
"""

from typing import Protocol

from torch import Tensor

from engine.layers.states import StatesOfStep


class Recurrences(Protocol):
    """The operations; each advances the states of the step's rows by all of its tokens.

    rowwise: whether a token has the same bits in chunks of any size, among any other rows."""

    rowwise: bool

    def by_rows(self) -> "Recurrences":
        """Return the same that are ``rowwise``, if there are such; else these."""
        ...

    def convolve(
        self,
        x_TC: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        windows_SKC: Tensor,
        step: StatesOfStep,
        silu: bool,
    ) -> Tensor:
        """Return y_TC, float32: y[t] = bias + sum over k of weight[k] x[t - K + 1 + k], and silu of it if wanted.

        windows_SKC: the last K - 1 inputs of each slot.  weight_KC: float32; bias_C: in the model's dtype."""
        ...

    def delta(
        self,
        qkv_TC: Tensor,
        a_TH: Tensor,
        b_TH: Tensor,
        decay_H: Tensor,
        bias_H: Tensor,
        most: float,
        matrices_SHKV: Tensor,
        step: StatesOfStep,
    ) -> Tensor:
        """Return o_THV, float32, of the gated delta rule (``recurrence.py``).

        qkv_TC: queries and keys of G heads, not yet of length 1, then values of H, float32; H / G heads share a key.
        The logarithm of a token's decay is decay * softplus(a + bias), its factor of the rule most * sigmoid(b)."""
        ...

    def ssd(
        self,
        xkq_TC: Tensor,
        sizes_TH: Tensor,
        decay_H: Tensor,
        bias_H: Tensor,
        skip_H: Tensor,
        least: float,
        matrices_SHKV: Tensor,
        step: StatesOfStep,
    ) -> Tensor:
        """Return o_THV, float32, of Mamba 2: linear attention with decay over values x, plus skip * x.

        xkq_TC: values of H heads, then keys and queries of G, float32.
        A token's size is softplus(size + bias), at least ``least``: it multiplies the value, and ``decay``."""
        ...

    def gate(
        self,
        o_TI: Tensor,
        z_TI: Tensor,
        weight: Tensor | None,
        num_groups: int,
        eps: float,
        gated_first: bool,
        kind: str = "silu",
    ) -> Tensor:
        """Return norm(o) * gate(z), or norm(o * gate(z)) if ``gated_first``, in the dtype of z.

        kind: the gate is silu or sigmoid.
        Each of the groups of a row has its own norm.  weight: of a row, or of each group alike; None for no norm."""
        ...
