"""The KV pool: one allocation per rank that holds every cached key and value.

Legend: L layers · P pages · S page size · G KV heads (of this rank) · H head size · T tokens of a step
        R size of a record, which is H if pages keep no scales
Owns: the memory and its layout.  Does not know: which sequence a page belongs to.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.layers.page_format import PageFormat

Layout = Literal["layer_first", "page_first"]
StoreKernel = Callable[[int, Tensor, Tensor, Tensor], None]


class KVPool:
    """Keys and values of all layers.

    data: [L, C, P + 1, S, G, R]; all layers have equal strides.  C is 2, for keys and values, or 1 if a value is the
    first latent_size numbers of its key (``AttentionSpec``).
    format: the ``PageFormat`` that ``kv_dtype`` selects.  dtype: type in which the model computes and reads.
    layout: order in memory.  'layer_first': the pages of a layer are contiguous.  'page_first': the layers of a page
    are contiguous, so that one copy moves a page to another tier.
    by_page: [P + 1, L, C, S, G, R] view of all memory as ``format.memory``; contiguous if page-first.
    page_stride: distance of the first slots of two successive pages; slot = page * page_stride + offset, in every
    layer.
    The last page is the dump page: padded rows of a captured batch write there, and it is never read unmasked.  It
    starts as zeros, so that a masked read of it is harmless.
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
        kv_dtype: str = "",
        latent_size: int = 0,
    ) -> None:
        self.layout = layout
        self.num_layers = num_layers
        self.format = PageFormat(dtype, kv_dtype)
        self.dtype = dtype
        self.head_size = head_size
        self._latent_size = latent_size
        self.page_stride = self.page_stride_of(layout, num_layers, page_size, latent_size)
        num_kinds = self.num_kinds(latent_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dump_page = num_pages
        # Zeros, not empty: attention multiplies masked positions by 0, and 0 * NaN is NaN.
        block = (page_size, num_kv_heads, self.format.record_size(head_size))
        if layout == "layer_first":
            memory = _zeros((num_layers, num_kinds, num_pages + 1, *block), self.format.memory, device)
            self.by_page = memory.movedim(2, 0)
            slots = memory.view(num_layers, num_kinds, (num_pages + 1) * page_size, *block[1:])
            self._key_slots = [slots[layer, 0] for layer in range(num_layers)]
            self._value_slots = [slots[layer, -1] for layer in range(num_layers)]
        else:
            self.by_page = _zeros((num_pages + 1, num_layers, num_kinds, *block), self.format.memory, device)
            # A layer's slots begin at its part of the first page; slots of other layers lie between its pages.
            slots = self.by_page.view(-1, *block[1:])
            self._key_slots = [slots[num_kinds * layer * page_size :] for layer in range(num_layers)]
            self._value_slots = [slots[(num_kinds * (layer + 1) - 1) * page_size :] for layer in range(num_layers)]
        self.data = self.format.numbers(self.by_page.movedim(0, 2))
        self._keys, self._values = ([*map(self.format.numbers, one)] for one in (self._key_slots, self._value_slots))
        if latent_size:
            self._values = [keys_SGR[..., :latent_size] for keys_SGR in self._keys]
        self._encode = None if self.format.plain else self.format.encode
        self._store_by: StoreKernel | None = None

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys as a [slots, G, R] view, contiguous; slot = page * page_stride + offset."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """Return a layer's values, a [slots, G, R] view; with latents [slots, 1, latent_size], a part of the keys."""
        return self._values[layer]

    def stride_of(self, layer: int) -> int:
        """Return the ``page_stride`` of a layer's own slots; another one only in a pool of several kinds of layers."""
        return self.page_stride

    def own_slots(self, layer: int, slots_T: Tensor) -> Tensor:
        """Return the layer's own slots, for slots by ``page_stride``."""
        return slots_T

    def read(self, layer: int, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return k_TGH and v_TGH, copies of what pages keep of these tokens."""
        k_TGR, v_TGR = self._key_slots[layer][slots_T], self._value_slots[layer][slots_T]
        size = self.format.head_size(k_TGR.shape[-1])
        k_TGH, v_TGH = (one.new_empty((*one.shape[:-1], size), dtype=self.dtype) for one in (k_TGR, v_TGR))
        v_TGH = self.format.decode(v_TGR, v_TGH)[..., : self._latent_size or size]
        return self.format.decode(k_TGR, k_TGH), v_TGH

    def store_latents(self, layer: int, latents_T1H: Tensor, slots_T: Tensor) -> None:
        """Write a step's new latents to their slots; a latent is a key, and its first numbers are the value."""
        latents_T1R = latents_T1H if self._encode is None else self._encode(latents_T1H)
        self._key_slots[layer].index_copy_(0, slots_T, latents_T1R)

    def store(self, layer: int, k_TGH: Tensor, v_TGH: Tensor, slots_T: Tensor) -> None:
        """Write a step's new keys and values to their slots, rounded to the format of the pages."""
        # A compiler can trace index_copy_, but not the kernel of a library.
        if self._store_by is not None and not torch.compiler.is_dynamo_compiling():
            self._store_by(layer, k_TGH, v_TGH, slots_T)
            return
        if self._encode is not None:
            k_TGH, v_TGH = self._encode(k_TGH), self._encode(v_TGH)
        self._key_slots[layer].index_copy_(0, slots_T, k_TGH)
        self._value_slots[layer].index_copy_(0, slots_T, v_TGH)

    def store_by(self, kernel: StoreKernel) -> None:
        """Make ``store`` call ``kernel(layer, k_TGH, v_TGH, slots_T)``: an attention library may have a faster one."""
        self._store_by = kernel

    @staticmethod
    def num_kinds(latent_size: int) -> int:
        """Return C: 2 for keys and values, 1 for latents that are both."""
        return 1 if latent_size else 2

    @staticmethod
    def page_stride_of(layout: Layout, num_layers: int, page_size: int, latent_size: int = 0) -> int:
        """Return the ``page_stride`` of such a pool."""
        return page_size if layout == "layer_first" else num_layers * KVPool.num_kinds(latent_size) * page_size

    @staticmethod
    def page_bytes(
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        kv_dtype: str = "",
        latent_size: int = 0,
    ) -> int:
        """Return the bytes that one page takes over all layers."""
        form = PageFormat(dtype, kv_dtype)
        num_vectors = num_layers * KVPool.num_kinds(latent_size) * page_size * num_kv_heads
        return num_vectors * form.record_size(head_size) * form.memory.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # calloc: pages that were never written take no memory, so a large pool costs nothing on a small machine.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
