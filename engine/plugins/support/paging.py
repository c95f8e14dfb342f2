"""Helpers for backends with compiled kernels: pages in the kernels' form, windows by layer, padding, trial batches, and
the pool that an attention needs.

Legend: B sequences · P page-table width
Owns: these conversions.  Does not know: any library.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool, Layout
from engine.layers.mixed_pool import LayerPlaces, MixedPool

KVPages = tuple[Tensor, Tensor]
Int32 = npt.NDArray[np.int32]


def new_pool(
    spec: AttentionSpec,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout = "layer_first",
    kv_dtype: str = "",
) -> KVPool:
    """Return a pool for this attention."""
    if spec.heads:
        return MixedPool(spec.heads, spec.lenders, num_pages, page_size, dtype, device, layout, kv_dtype)
    heads = spec.num_kv_heads, spec.head_size
    return KVPool(
        spec.num_layers, num_pages, page_size, *heads, dtype, device, layout, kv_dtype, latent_size=spec.latent_size
    )


def page_bytes(spec: AttentionSpec, page_size: int, dtype: torch.dtype, kv_dtype: str = "") -> int:
    """Return the bytes that a page of such a pool takes over all layers."""
    if spec.heads:
        places = LayerPlaces(spec.heads, spec.lenders)
        return KVPool.page_bytes(places.count, page_size, 1, places.width, dtype, kv_dtype)
    heads = spec.num_kv_heads, spec.head_size
    return KVPool.page_bytes(spec.num_layers, page_size, *heads, dtype, kv_dtype, spec.latent_size)


def page_stride(spec: AttentionSpec, page_size: int, layout: Layout) -> int:
    """Return the ``page_stride`` of such a pool."""
    num_layers = LayerPlaces(spec.heads, spec.lenders).count if spec.heads else spec.num_layers
    return KVPool.page_stride_of(layout, num_layers, page_size, spec.latent_size)


def pages_of(pool: KVPool) -> list[KVPages]:
    """Return keys and values per layer as [page, slot, head, size], both with the same strides."""
    rows = (pool.num_pages + 1, pool.page_size)

    def paged(slots_SGR: Tensor) -> Tensor:
        record = slots_SGR[0].numel()
        return slots_SGR.as_strided((*rows, *slots_SGR.shape[1:]), (pool.page_stride * record, *slots_SGR.stride()))

    return [(paged(pool.keys(layer)), paged(pool.values(layer))) for layer in range(pool.num_layers)]


def windows_of(spec: AttentionSpec) -> list[int]:
    """Return the windows of the model's layers, 0 for none; at most two."""
    if not spec.window:
        return [0]
    return [0, spec.window] if spec.first_window_layer or spec.full_layers else [spec.window]


def variant_of(spec: AttentionSpec, layer: int) -> int:
    """Return the index of a layer's window in ``windows_of``."""
    return windows_of(spec).index(spec.window_of(layer))


def padding_on_dump_page(batch: AttentionBatch, pool: KVPool) -> Tensor:
    """Return page_table_BP with the dump page in rows of length 0, in place of page 0, which belongs to a sequence.

    The output of such rows is not used, but it passes through the layers and must not become NaN.
    """
    if batch.host_lengths.all():
        return batch.page_table_BP
    return torch.where(batch.lengths_B[:, None] > 0, batch.page_table_BP, pool.dump_page)


def positive_lengths(batch: AttentionBatch) -> Tensor:
    """Return lengths_B with 1 for padding rows, as these have one page."""
    return batch.lengths_B if batch.host_lengths.all() else batch.lengths_B.clamp(min=1)


def batch_on(
    device: torch.device, num_decodes: int, page_table_BP: Int32, lengths: Int32, query_lengths: Int32
) -> AttentionBatch:
    """Return a batch on the device from sequences on the host, for a trial."""
    starts = np.concatenate(([0], query_lengths.cumsum())).astype(np.int32)
    return AttentionBatch(
        num_decodes=num_decodes,
        page_table_BP=torch.from_numpy(page_table_BP).to(device),
        lengths_B=torch.from_numpy(lengths).to(device),
        query_starts_B1=torch.from_numpy(starts).to(device),
        host_lengths=lengths,
        host_query_lengths=query_lengths,
    )
