"""Steps of given shapes, for backends that are to be asked what they launch.

Owns: a batch's tensors.  Does not know: pools, backends.
"""

import numpy as np
import torch

from engine.layers.attention import AttentionBatch

META = torch.device("meta")  # tensors without content: asking one for a length raises


def batch_of(
    num_decodes: int, num_prompts: int = 0, width: int = 8, length: int = 1, device: torch.device = META
) -> AttentionBatch:
    """Prompts have ``length`` new tokens."""
    count = num_decodes + num_prompts
    queries = np.array([1] * num_decodes + [length] * num_prompts, dtype=np.int32)
    return AttentionBatch(
        num_decodes=num_decodes,
        page_table_BP=torch.zeros((count, width), dtype=torch.int32, device=device),
        lengths_B=torch.full((count,), length, dtype=torch.int32, device=device),
        query_starts_B1=torch.zeros(count + 1, dtype=torch.int32, device=device),
        host_lengths=np.full(count, length, dtype=np.int32),
        host_query_lengths=queries,
    )
