"""The KV pool of a model whose layers have heads of several sizes, or read the keys of other layers.

Legend: P pages · S page size · G KV heads of a layer · H head size of a layer · W numbers of a place's token
        T tokens of a step
Owns: the place of each layer in the memory.  Does not know: which sequence a page belongs to, models.

The memory is that of a plain pool of ``places``, each with the keys and values of one layer of the widest records, or
of several layers with narrower ones: page after page, a part of the page for each.  So all that copies pages copies
these, too.  A layer with W / n numbers in each token has pages whose first slots are n times as far apart.
"""

from collections.abc import Sequence
from math import lcm

import torch
from torch import Tensor

from engine.layers.kv_pool import KVPool, Layout
from engine.types.errors import ConfigError

Heads = tuple[int, int]


class LayerPlaces:
    """The places of layers in the memory.  heads, lenders: as in ``AttentionSpec``.

    width: W.  count: number of places.  of: (place, part of it) of each layer.  shares: layers of a place, for each.
    Places follow their first layers, so no layer before ``number`` reads place ``number``: what lands layer by layer in
    a plain pool may land place by place here."""

    def __init__(self, heads: Sequence[Heads], lenders: Sequence[int]) -> None:
        widths = [count * size for count, size in heads]
        owners = [layer for layer, lender in enumerate(lenders) if layer == lender]
        self.width = lcm(*(widths[layer] for layer in owners))
        self.shares = [self.width // width for width in widths]
        places: list[list[int]] = []  # the layers of each
        for share in {self.shares[layer] for layer in owners}:
            alike = [layer for layer in owners if self.shares[layer] == share]
            places += [alike[first : first + share] for first in range(0, len(alike), share)]
        places.sort()
        self.count = len(places)
        found = {layer: (place, part) for place, own in enumerate(places) for part, layer in enumerate(own)}
        self.of = [found[lender] for lender in lenders]


class MixedPool(KVPool):
    """Keys and values of layers with heads of their own; the places are the layers of the plain pool."""

    def __init__(
        self,
        heads: Sequence[Heads],
        lenders: Sequence[int],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout = "layer_first",
        kv_dtype: str = "",
    ) -> None:
        places = self._places = LayerPlaces(heads, lenders)
        super().__init__(places.count, num_pages, page_size, 1, places.width, dtype, device, layout, kv_dtype)
        if self.format.scaled:
            raise ConfigError(
                f"kv.dtype={kv_dtype}: scales have no room where layers have heads of several sizes; set kv.dtype to "
                "'auto', 'bfloat16' or 'fp8_e4m3'"
            )
        self.heads = tuple(heads)
        key_slots, value_slots = self._key_slots, self._value_slots
        self._key_slots, self._value_slots = (
            [
                slots[place].view(-1, *own)[part * page_size :]
                for own, (place, part) in zip(heads, places.of, strict=True)
            ]
            for slots in (key_slots, value_slots)
        )
        self._keys, self._values = ([*map(self.format.numbers, one)] for one in (self._key_slots, self._value_slots))

    def stride_of(self, layer: int) -> int:
        return self.page_stride * self._places.shares[layer]

    def own_slots(self, layer: int, slots_T: Tensor) -> Tensor:
        more = self.stride_of(layer) - self.page_stride
        return slots_T + slots_T // self.page_stride * more if more else slots_T

    def part(self, layers: Sequence[int]) -> "PoolPart":
        """Return the pool of some of the layers, which have the same heads."""
        return PoolPart(self, layers)


class PoolPart(KVPool):
    """Layers of one kind of a ``MixedPool``, as a backend sees them: a pool of its own, in the same memory."""

    def __init__(self, whole: MixedPool, layers: Sequence[int]) -> None:
        self.layout, self.format, self.dtype = whole.layout, whole.format, whole.dtype
        self.num_pages, self.page_size, self.dump_page = whole.num_pages, whole.page_size, whole.dump_page
        self.data, self.by_page = whole.data, whole.by_page
        self.num_layers, self.head_size = len(layers), whole.heads[layers[0]][1]
        self.page_stride = whole.stride_of(layers[0])
        self._latent_size, self._encode, self._store_by = 0, whole._encode, None
        slots = (whole._key_slots, whole._value_slots, whole._keys, whole._values)
        self._key_slots, self._value_slots, self._keys, self._values = ([one[at] for at in layers] for one in slots)
