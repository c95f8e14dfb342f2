"""Layers with heads of several sizes share the pages of one pool, and layers that borrow keys read their lender's."""

import pytest
import torch

from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import Layout
from engine.layers.mixed_pool import MixedPool
from engine.plugins.support.paging import new_pool, page_bytes, page_stride, pages_of
from engine.types.errors import ConfigError

# Two layers of narrow records in one place, one in half of another; the last two read what layers 1 and 2 store.
HEADS = ((2, 4), (2, 4), (1, 16), (2, 4), (2, 4), (1, 16))
LENDERS = (0, 1, 2, 3, 1, 2)
SPEC = AttentionSpec(6, 4, 1, 16, 1.0, window=8, full_layers=(2, 5), heads=HEADS, lenders=LENDERS)
PAGES, SIZE = 5, 4
LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")


def filled(layout: Layout) -> tuple[MixedPool, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    pool = new_pool(SPEC, PAGES, SIZE, torch.float32, torch.device("cpu"), layout)
    assert isinstance(pool, MixedPool)
    stored = {}
    for layer in range(4):
        slots = pool.own_slots(layer, all_slots(pool))
        stored[layer] = torch.randn(len(slots), *HEADS[layer]), torch.randn(len(slots), *HEADS[layer])
        pool.store(layer, *stored[layer], slots)
    return pool, stored


def all_slots(pool: MixedPool) -> torch.Tensor:
    return (torch.arange(PAGES)[:, None] * pool.page_stride + torch.arange(SIZE)).flatten()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_keeps_its_own_and_borrowers_read_their_lenders(layout: Layout) -> None:
    pool, stored = filled(layout)
    for layer, lender in enumerate(LENDERS):
        for got, expected in zip(pool.read(layer, pool.own_slots(layer, all_slots(pool))), stored[lender], strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copied_page_has_every_layer(layout: Layout) -> None:
    pool, stored = filled(layout)
    pool.by_page[3] = pool.by_page[1].clone()
    for layer in range(4):
        keys, values = pool.read(layer, pool.own_slots(layer, all_slots(pool)))
        for got, expected in zip((keys, values), stored[layer], strict=True):
            expected[3 * SIZE : 4 * SIZE] = expected[SIZE : 2 * SIZE]
            assert torch.equal(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kind_of_layers_is_a_pool_of_its_own(layout: Layout) -> None:
    pool, stored = filled(layout)
    kinds = SPEC.kinds
    assert [(layers, one.num_kv_heads, one.head_size, one.window, one.needs) for layers, one in kinds] == [
        ([0, 1, 3, 4], 2, 4, 8, ()),
        ([2, 5], 1, 16, 0, ()),
    ]
    for layers, _ in kinds:
        part = pool.part(layers)
        slots = (torch.arange(PAGES)[:, None] * part.page_stride + torch.arange(SIZE)).flatten()
        for index, layer in enumerate(layers):
            keys, values = stored[LENDERS[layer]]
            assert torch.equal(part.keys(index)[slots], keys)
            in_pages = pages_of(part)[index]
            assert torch.equal(in_pages[0][:PAGES].flatten(0, 1), keys)
            assert torch.equal(in_pages[1][:PAGES].flatten(0, 1), values)


def test_the_books_agree_with_the_memory() -> None:
    for layout in LAYOUTS:
        pool, _ = filled(layout)
        assert pool.data.nbytes == (PAGES + 1) * page_bytes(SPEC, SIZE, torch.float32)
        assert pool.page_stride == page_stride(SPEC, SIZE, layout)
    records = 2 * (2 * 16 + 16)  # three narrow layers in two places, and a wide one; borrowers take none
    assert page_bytes(SPEC, SIZE, torch.float32) == SIZE * records * 4


def test_scales_have_no_room() -> None:
    with pytest.raises(ConfigError, match="scales have no room where layers have heads of several"):
        new_pool(SPEC, PAGES, SIZE, torch.float32, torch.device("cpu"), kv_dtype="int8")
