"""The operations of recurrent layers in torch, for every device; without kernels they compute, with them they compare.

Legend: T new tokens of a step · C channels of a convolution · K taps, or size of a key · V size of a value
        G heads with a key, or groups of a norm · H heads with a value · S slots · B rows of the step
        I numbers of all values · N numbers of a group · A decays: H, or H K · X 1 or K
Owns: what comes before and after a recurrence.  Does not know: the recurrence's form, slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.mlp import activated
from engine.layers.recurrence import RecurrenceTerms, advance
from engine.layers.states import StatesOfStep

UNIT_EPS = 1e-6  # added to the squared length of queries and keys


class TorchRecurrences:
    """The ``Recurrences`` of torch.  A chunk of several tokens has other bits than these tokens one by one."""

    rowwise = False

    def by_rows(self) -> "TorchRecurrences":
        """Return these."""
        return self

    def convolve(
        self,
        x_TC: Tensor,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        windows_SKC: Tensor,
        step: StatesOfStep,
        silu: bool,
    ) -> Tensor:
        """Return y_TC, and keep each row's last inputs.  A sum has one order wherever a prompt is cut."""
        before_BKC, x_TC = step.read(windows_SKC), x_TC.float()
        if step.only_decodes:
            inputs = [*before_BKC.unbind(1), x_TC]
            kept_BKC = torch.cat((before_BKC[:, 1:], x_TC[:, None]), 1)
        else:
            table = torch.cat((before_BKC.flatten(0, 1), x_TC))
            at_KT, kept_B = step.taps(len(weight_KC))
            inputs = [table.index_select(0, at_T) for at_T in at_KT]
            kept_BKC = table.index_select(0, kept_B).view_as(before_BKC)
        step.write(windows_SKC, kept_BKC)
        y_TC = inputs[0] * weight_KC[0]
        for input_TC, weight_C in zip(inputs[1:], weight_KC[1:], strict=True):
            y_TC += input_TC * weight_C
        if bias_C is not None:
            y_TC.add_(bias_C)
        return F.silu(y_TC) if silu else y_TC

    def delta(
        self,
        qkv_TC: Tensor,
        a_TA: Tensor,
        b_TH: Tensor,
        decay_H: Tensor,
        bias_A: Tensor,
        most: float,
        matrices_SHKV: Tensor,
        step: StatesOfStep,
    ) -> Tensor:
        _, heads, key, value = matrices_SHKV.shape
        keys = (qkv_TC.shape[1] - heads * value) // 2
        q_TGK, k_TGK = qkv_TC[:, : 2 * keys].unflatten(1, (2, -1, key)).unbind(1)
        shared = heads * key // keys
        terms = RecurrenceTerms(
            q_THK=(_unit(q_TGK) * key**-0.5).repeat_interleave(shared, 1),
            k_THK=_unit(k_TGK).repeat_interleave(shared, 1),
            v_THV=qkv_TC[:, 2 * keys :].unflatten(1, (heads, value)),
            g_THX=decay_H[:, None] * F.softplus(a_TA.float() + bias_A).unflatten(1, (heads, -1)),
            b_TH=most * b_TH.float().sigmoid(),
        )
        return advance(terms, matrices_SHKV, step)

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
        _, heads, key, value = matrices_SHKV.shape
        x_THV = xkq_TC[:, : heads * value].unflatten(1, (heads, value))
        k_TGK, q_TGK = xkq_TC[:, heads * value :].unflatten(1, (2, -1, key)).unbind(1)
        shared = heads // k_TGK.shape[1]
        sizes_TH = F.softplus(sizes_TH.float() + bias_H).clamp_(min=least)
        terms = RecurrenceTerms(
            q_THK=q_TGK.repeat_interleave(shared, 1),
            k_THK=k_TGK.repeat_interleave(shared, 1),
            v_THV=x_THV * sizes_TH[..., None],
            g_THX=(decay_H * sizes_TH)[..., None],
        )
        return advance(terms, matrices_SHKV, step) + x_THV * skip_H[:, None]

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
        """Return the result behind gate and norm."""
        gates_TI = activated(z_TI.float(), kind)
        if weight is None:
            return (o_TI * gates_TI).to(z_TI.dtype)
        o_TGN = (o_TI * gates_TI if gated_first else o_TI).unflatten(1, (num_groups, -1))
        of_group = weight if len(weight) == o_TGN.shape[-1] else None
        normed_TI = F.rms_norm(o_TGN, o_TGN.shape[-1:], of_group, eps).flatten(1)
        if of_group is None:
            normed_TI = normed_TI * weight
        return (normed_TI if gated_first else normed_TI * gates_TI).to(z_TI.dtype)


def _unit(x_TGK: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return x_TGK * torch.rsqrt(x_TGK.square().sum(-1, keepdim=True) + UNIT_EPS)
