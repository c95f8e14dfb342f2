"""Where keys, values and latents lie."""

import pytest
import torch

from engine.layers.kv_pool import KVPool, Layout

LAYERS, PAGES, PAGE_SIZE = 3, 4, 2


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("heads,size,latent_size", [(2, 8, 0), (1, 10, 6)])
def test_the_books_agree_with_the_memory(layout: Layout, heads: int, size: int, latent_size: int):
    pool = KVPool(
        LAYERS, PAGES, PAGE_SIZE, heads, size, torch.float16, torch.device("cpu"), layout, latent_size=latent_size
    )
    page_bytes = KVPool.page_bytes(LAYERS, PAGE_SIZE, heads, size, torch.float16, latent_size=latent_size)
    assert pool.data.nbytes == (PAGES + 1) * page_bytes
    assert pool.by_page[0].nbytes == page_bytes
    assert pool.page_stride == KVPool.page_stride_of(layout, LAYERS, PAGE_SIZE, latent_size)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_latent_is_kept_once_and_begins_with_its_value(layout: Layout):
    pool = KVPool(LAYERS, PAGES, PAGE_SIZE, 1, 10, torch.float32, torch.device("cpu"), layout, latent_size=6)
    for layer in range(LAYERS):
        slots = torch.tensor([page * pool.page_stride + offset for page in range(PAGES) for offset in range(PAGE_SIZE)])
        latents_T1H = torch.arange(len(slots) * 10.0).view(-1, 1, 10) + 1000 * layer
        pool.store_latents(layer, latents_T1H, slots)
        assert torch.equal(pool.keys(layer)[slots], latents_T1H)
        assert torch.equal(pool.values(layer)[slots], latents_T1H[..., :6])
    # [P, S, H] of one layer, page by page.
    expected = (torch.arange(PAGES * PAGE_SIZE * 10.0) + 1000).view(PAGES, PAGE_SIZE, 10)
    assert torch.equal(pool.by_page[:PAGES, 1, 0, :, 0], expected)
