"""Writing a step's keys and values to their pages by FlashInfer: one launch, where torch takes one for each.

Legend: T new tokens of the step · G KV heads · H head size
Owns: how slots are told to the library.  Does not know: sequences, models.
"""

from types import ModuleType

import torch
from torch import Tensor

from engine.layers.kv_pool import KVPool
from engine.plugins.support.paging import pages_of


class PagedAppend:
    """See ``KVPool.store_by``.  Its own tensors never change, so it may be captured in a graph.

    FlashInfer finds a token's place by its sequence's page list.  Told that there is one sequence, which has all pages
    of the pool in their order, it takes slots for positions: they are known already, and no list has to be made.
    """

    def __init__(self, library: ModuleType, pool: KVPool) -> None:
        num_pages, page_size, device = pool.num_pages + 1, pool.page_size, pool.data.device
        self._append = library.append_paged_kv_cache
        self._layers = pages_of(pool)
        self._pages_P = torch.arange(num_pages, dtype=torch.int32, device=device)
        self._starts_2 = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
        self._last_1 = torch.tensor([page_size], dtype=torch.int32, device=device)

    def __call__(self, layer: int, k_TGH: Tensor, v_TGH: Tensor, slots_T: Tensor) -> None:
        """k_TGH and v_TGH may be parts of wider tensors.  slots_T: int64; below 2**31, as page_size * pages is."""
        positions_T = slots_T.int()
        self._append(
            append_key=k_TGH,
            append_value=v_TGH,
            batch_indices=torch.zeros_like(positions_T),
            positions=positions_T,
            paged_kv_cache=self._layers[layer],
            kv_indices=self._pages_P,
            kv_indptr=self._starts_2,
            kv_last_page_len=self._last_1,
            kv_layout="NHD",
        )
