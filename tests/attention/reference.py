"""Attention written as its definition, in float64, for one query at a time.

Legend: N query heads · G KV heads · H head size · L keys of a sequence
"""

import math

import torch
from torch import Tensor


def attend_one(q_NH: Tensor, keys_LGH: Tensor, values_LGH: Tensor, scale: float, window: int) -> Tensor:
    """The last position's output over its context; all in float64."""
    first = max(0, len(keys_LGH) - window) if window else 0
    keys_LGH, values_LGH = keys_LGH[first:].double(), values_LGH[first:].double()
    group = len(q_NH) // keys_LGH.shape[1]
    rows = []
    for head, q_H in enumerate(q_NH.double()):
        scores = [scale * math.fsum((q_H * key_GH[head // group]).tolist()) for key_GH in keys_LGH]
        weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
        rows.append((weights[:, None] * values_LGH[:, head // group]).sum(0))
    return torch.stack(rows)
