"""What backends around compiled kernels share: pages as kernels want them, windows by layer, padding, trial batches;
and the pool that an attention needs.

Legend: B sequences · P page-table width
Owns: nothing but these few facts.  Does not know: any library.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool, Layout

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
    """A pool for this attention."""
    heads = spec.num_kv_heads, spec.head_size
    return KVPool(
        spec.num_layers, num_pages, page_size, *heads, dtype, device, layout, kv_dtype, latent_size=spec.latent_size
    )


def page_bytes(spec: AttentionSpec, page_size: int, dtype: torch.dtype, kv_dtype: str = "") -> int:
    """Bytes that a page of such a pool takes over all layers."""
    heads = spec.num_kv_heads, spec.head_size
    return KVPool.page_bytes(spec.num_layers, page_size, *heads, dtype, kv_dtype, spec.latent_size)


def pages_of(pool: KVPool) -> list[KVPages]:
    """Per layer keys and values as [page, slot, head, size], both with the same strides."""
    return [(layer[0], layer[1]) for layer in pool.data.unbind(0)]


def windows_of(spec: AttentionSpec) -> list[int]:
    """The windows that the model's layers have, 0 for none; at most two."""
    if not spec.window:
        return [0]
    return [0, spec.window] if spec.first_window_layer or spec.full_layers else [spec.window]


def variant_of(spec: AttentionSpec, layer: int) -> int:
    """Which of ``windows_of`` a layer has."""
    return windows_of(spec).index(spec.window_of(layer))


def padding_on_dump_page(batch: AttentionBatch, pool: KVPool) -> Tensor:
    """page_table_BP, in which rows of length 0 have the dump page instead of page 0, which belongs to a sequence.

    The output of such rows is not used, but it goes on through the layers and must not become NaN.
    """
    if batch.host_lengths.all():
        return batch.page_table_BP
    return torch.where(batch.lengths_B[:, None] > 0, batch.page_table_BP, pool.dump_page)


def positive_lengths(batch: AttentionBatch) -> Tensor:
    """lengths_B, in which rows that only pad have a token, as they have a page."""
    return batch.lengths_B if batch.host_lengths.all() else batch.lengths_B.clamp(min=1)


def batch_on(
    device: torch.device, num_decodes: int, page_table_BP: Int32, lengths: Int32, query_lengths: Int32
) -> AttentionBatch:
    """A batch of sequences that the host knows, for a trial."""
    starts = np.concatenate(([0], query_lengths.cumsum())).astype(np.int32)
    return AttentionBatch(
        num_decodes=num_decodes,
        page_table_BP=torch.from_numpy(page_table_BP).to(device),
        lengths_B=torch.from_numpy(lengths).to(device),
        query_starts_B1=torch.from_numpy(starts).to(device),
        host_lengths=lengths,
        host_query_lengths=query_lengths,
    )
