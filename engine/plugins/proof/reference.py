"""Attention by its definition, softmax(q k^T) v, in float64 on the CPU.

Legend: n queries of a sequence, its last positions · L keys of it · N query heads · G KV heads · R query heads of
        each · H head size
"""

import torch
from torch import Tensor


def attend(
    q_nNH: Tensor,
    keys_LGH: Tensor,
    values_LGH: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_N: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Return causal attention of a sequence's last n positions over all L, in float64.  window, soft_cap: 0 is none.

    chunked: as in ``AttentionSpec``."""
    q_nNH, keys_LGH, values_LGH = (one.detach().cpu().double() for one in (q_nNH, keys_LGH, values_LGH))
    num_queries, num_keys = len(q_nNH), len(keys_LGH)
    q_nGRH = q_nNH.reshape(num_queries, keys_LGH.shape[1], -1, q_nNH.shape[-1])
    query_n1 = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key_L = torch.arange(num_keys)
    hidden_nL = key_L > query_n1
    if window:
        first_n1 = query_n1 // window * window if chunked else query_n1 - window + 1
        hidden_nL = hidden_nL | (key_L < first_n1)
    scores_NnL = torch.einsum("ngrh,lgh->grnl", q_nGRH, keys_LGH).flatten(0, 1) * scale
    if soft_cap:
        scores_NnL = soft_cap * (scores_NnL / soft_cap).tanh()
    scores_NnL = scores_NnL.masked_fill(hidden_nL, -torch.inf)
    if sinks_N is not None:
        sinks_Nn1 = sinks_N.detach().double().cpu()[:, None, None].expand(-1, num_queries, 1)
        weights_NnL = torch.cat((scores_NnL, sinks_Nn1), -1).softmax(-1)[..., :-1]
    else:
        weights_NnL = scores_NnL.softmax(-1)
    weights_GRnL = weights_NnL.reshape(*q_nGRH.shape[1:3], num_queries, num_keys)
    return torch.einsum("grnl,lgh->ngrh", weights_GRnL, values_LGH).flatten(1, 2)
