"""The operations of recurrent layers between their products, in Triton.

Legend: as in ``engine/layers/recurrences.py``
Owns: which kernel takes which rows.  Does not know: the kernels' arithmetic.
"""

from typing import Final

from torch import Tensor

from engine.kernels.chunks import CHUNK, advance_prompts
from engine.kernels.convolution import convolve
from engine.kernels.gated_norm import gate
from engine.kernels.recurrence import TokenTerms, advance_rows
from engine.layers.states import StatesOfStep

FEWEST: Final = 16  # tokens of a row from which its chunks cost less than the tokens one after another


class TritonRecurrences:
    """The ``Recurrences`` of a GPU.

    rowwise: whether prompts advance token after token.  A chunk of several has other bits than these one by one."""

    convolve = staticmethod(convolve)
    gate = staticmethod(gate)

    def __init__(self, rowwise: bool = False) -> None:
        self.rowwise = rowwise

    def by_rows(self) -> "TritonRecurrences":
        """Return those that advance token after token."""
        return TritonRecurrences(rowwise=True)

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
        """Return o_THV of the gated delta rule."""
        _, heads, key, value = matrices_SHKV.shape
        keys = (qkv_TC.shape[1] - heads * value) // 2
        q_TGK, k_TGK = qkv_TC[:, : 2 * keys].unflatten(1, (2, -1, key)).unbind(1)
        v_THV = qkv_TC[:, 2 * keys :].unflatten(1, (heads, value))
        return self._advance(TokenTerms(q_TGK, k_TGK, v_THV, a_TH, decay_H, bias_H, b_TH, most), matrices_SHKV, step)

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
        """Return o_THV of Mamba 2."""
        _, heads, key, value = matrices_SHKV.shape
        x_THV = xkq_TC[:, : heads * value].unflatten(1, (heads, value))
        k_TGK, q_TGK = xkq_TC[:, heads * value :].unflatten(1, (2, -1, key)).unbind(1)
        terms = TokenTerms(q_TGK, k_TGK, x_THV, sizes_TH, decay_H, bias_H, skip_H=skip_H, least_step=least)
        return self._advance(terms, matrices_SHKV, step)

    def _advance(self, terms: TokenTerms, matrices_SHKV: Tensor, step: StatesOfStep) -> Tensor:
        if self.rowwise or step.longest < FEWEST:
            return advance_rows(terms, matrices_SHKV, step, None)
        prompts = step.prompts(FEWEST, CHUNK)
        o_THV = advance_rows(terms, matrices_SHKV, step, prompts.few_F)
        advance_prompts(terms, matrices_SHKV, step, prompts, o_THV)
        return o_THV
