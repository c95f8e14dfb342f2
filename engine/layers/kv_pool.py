"""The KV pool: one allocation per rank that holds every cached key and value.

Legend: L layers · P pages · S page size · G KV heads (of this rank) · H head size · T tokens of a step
Owns: the memory and its layout.  Does not know: which page belongs to whom.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Layout = Literal["layer_first", "page_first"]
StoreKernel = Callable[[int, Tensor, Tensor, Tensor], None]


class KVPool:
    """K and V of all layers.  data: [L, C, P + 1, S, G, H]; all have equal strides.

    C is 2, keys and values; 1 where values are the first latent_size numbers of their keys, see ``AttentionSpec``.

    layout: what lies side by side in memory.  'layer_first': a layer's pages.  'page_first': a page's layers, so that a
    page is one block, which goes to another tier as one copy.
    page_stride: from the first slot of a page to that of the next; slot = page * page_stride + offset, in every layer.
    The last page is the dump: padded rows of a captured batch write there, nobody reads it, and it
    starts as zeros so that a masked read of it is harmless.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout = "layer_first",
        latent_size: int = 0,
    ) -> None:
        self.layout = layout
        self.page_stride = self.page_stride_of(layout, num_layers, page_size, latent_size)
        num_kinds = self.num_kinds(latent_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dump_page = num_pages
        # Zeros, not empty: attention multiplies masked positions by 0, and 0 * NaN is NaN.
        block = (page_size, num_kv_heads, head_size)
        if layout == "layer_first":
            self.data = _zeros((num_layers, num_kinds, num_pages + 1, *block), dtype, device)
            slots = self.data.view(num_layers, num_kinds, (num_pages + 1) * page_size, num_kv_heads, head_size)
            self._key_slots = [slots[layer, 0] for layer in range(num_layers)]
            self._value_slots = [slots[layer, -1] for layer in range(num_layers)]
        else:
            memory = _zeros((num_pages + 1, num_layers, num_kinds, *block), dtype, device)
            self.data = memory.movedim(0, 2)
            # A layer's slots begin where its part of the first page does, and others' lie between its own pages.
            slots = memory.view(-1, num_kv_heads, head_size)
            self._key_slots = [slots[num_kinds * layer * page_size :] for layer in range(num_layers)]
            self._value_slots = [slots[(num_kinds * (layer + 1) - 1) * page_size :] for layer in range(num_layers)]
        if latent_size:
            self._value_slots = [slots[..., :latent_size] for slots in self._key_slots]
        self._store_by: StoreKernel | None = None

    @property
    def by_page(self) -> Tensor:
        """[P + 1, L, C, S, G, H] view of all of it: what each page holds; contiguous if page-first."""
        return self.data.movedim(2, 0)

    def keys(self, layer: int) -> Tensor:
        """[slots, G, H] view of a layer's keys, contiguous; slot = page * page_stride + offset."""
        return self._key_slots[layer]

    def values(self, layer: int) -> Tensor:
        """[slots, G, H] view of a layer's values; of latents [slots, 1, latent_size], the first numbers of the keys."""
        return self._value_slots[layer]

    def store_latents(self, layer: int, latents_T1H: Tensor, slots_T: Tensor) -> None:
        """Write a step's new latents, keys whose first numbers are the values, to their slots."""
        self._key_slots[layer].index_copy_(0, slots_T, latents_T1H)

    def store(self, layer: int, k_TGH: Tensor, v_TGH: Tensor, slots_T: Tensor) -> None:
        """Write a step's new keys and values to their slots."""
        # A compiler knows what an index_copy_ is, and nothing of a library's kernel.
        if self._store_by is not None and not torch.compiler.is_dynamo_compiling():
            self._store_by(layer, k_TGH, v_TGH, slots_T)
            return
        self._key_slots[layer].index_copy_(0, slots_T, k_TGH)
        self._value_slots[layer].index_copy_(0, slots_T, v_TGH)

    def store_by(self, kernel: StoreKernel) -> None:
        """Have ``store`` call ``kernel(layer, k_TGH, v_TGH, slots_T)``: an attention library may have a faster one."""
        self._store_by = kernel

    @staticmethod
    def num_kinds(latent_size: int) -> int:
        """C: keys and values, or latents that are both."""
        return 1 if latent_size else 2

    @staticmethod
    def page_stride_of(layout: Layout, num_layers: int, page_size: int, latent_size: int = 0) -> int:
        """``page_stride`` of such a pool."""
        return page_size if layout == "layer_first" else num_layers * KVPool.num_kinds(latent_size) * page_size

    @staticmethod
    def page_bytes(
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        latent_size: int = 0,
    ) -> int:
        """Bytes one page takes over all layers."""
        kinds = KVPool.num_kinds(latent_size)
        return num_layers * kinds * page_size * num_kv_heads * head_size * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # calloc: pages that were never written take no memory, so a roomy pool costs nothing on a small box.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
