"""The recurrences of recurrent layers by their definitions, in float64, token after token of one row.

Legend: T tokens · C channels · G heads with a key · H heads with a value · K size of a key · V size of a value
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.torch_recurrences import UNIT_EPS


def gated_delta(
    qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor, decay_H: Tensor, bias_H: Tensor, most: float, groups: int, key: int
) -> Tensor:
    """Return o_THV of the gated delta rule."""
    heads, keys = len(decay_H), 2 * groups * key
    q, k = (one.unflatten(1, (groups, key)) for one in qkv_TC[:, :keys].double().chunk(2, 1))
    q, k = (_for_heads(one / (one.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt(), heads) for one in (q, k))
    v = qkv_TC[:, keys:].double().unflatten(1, (heads, -1))
    decay, factor = (decay_H.double() * F.softplus(a_TH.double() + bias_H)).exp(), most * b_TH.double().sigmoid()
    o, m = torch.empty_like(v), torch.zeros(heads, key, v.shape[-1], dtype=torch.float64)
    for t in range(len(v)):
        m = m * decay[t, :, None, None]
        known = torch.einsum("hk,hkv->hv", k[t], m)
        m = m + k[t][:, :, None] * (factor[t, :, None] * (v[t] - known))[:, None]
        o[t] = torch.einsum("hk,hkv->hv", q[t], m) * key**-0.5
    return o


def mamba_2(
    xkq_TC: Tensor,
    sizes_TH: Tensor,
    decay_H: Tensor,
    bias_H: Tensor,
    skip_H: Tensor,
    least: float,
    groups: int,
    key: int,
) -> Tensor:
    """Return o_THV of Mamba 2."""
    heads, keys = len(decay_H), 2 * groups * key
    x = xkq_TC[:, :-keys].double().unflatten(1, (heads, -1))
    k, q = (_for_heads(one.unflatten(1, (groups, key)), heads) for one in xkq_TC[:, -keys:].double().chunk(2, 1))
    sizes = F.softplus(sizes_TH.double() + bias_H).clamp(min=least)
    o, m = torch.empty_like(x), torch.zeros(heads, key, x.shape[-1], dtype=torch.float64)
    for t in range(len(x)):
        m = m * (decay_H * sizes[t]).exp()[:, None, None] + k[t][:, :, None] * (sizes[t, :, None] * x[t])[:, None]
        o[t] = torch.einsum("hk,hkv->hv", q[t], m) + skip_H[:, None] * x[t]
    return o


def convolution(x_TC: Tensor, weight_KC: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return y_TC of a causal convolution of each channel."""
    padded_CT = F.pad(x_TC.double().t(), (len(weight_KC) - 1, 0))
    y_CT = F.conv1d(padded_CT[None], weight_KC.double().t()[:, None], groups=x_TC.shape[1])[0]
    return y_CT.t() + (0 if bias_C is None else bias_C.double())


def _for_heads(x_TGK: Tensor, heads: int) -> Tensor:
    return x_TGK.repeat_interleave(heads // x_TGK.shape[1], 1)
