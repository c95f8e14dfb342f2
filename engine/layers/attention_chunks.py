"""Chunked attention as full attention: each chunk of a sequence is a sequence of its own, with its own pages.

Legend: B sequences · C chunks of all sequences that have new tokens · P page-table width
Owns: the batch of chunks.  Does not know: kernels, models, the scheduler.
"""

import numpy as np
import torch

from engine.layers.attention import AttentionBatch


def in_chunks(batch: AttentionBatch, chunk: int, page_size: int) -> AttentionBatch:
    """Return the batch for layers in which a query sees the tokens of its own chunk.

    New tokens of a sequence that lie in several chunks become as many sequences, in the same order.  Every chunk begins
    with a page: page_size divides chunk."""
    lengths_B, news_B = batch.host_lengths.astype(np.int64), batch.host_query_lengths.astype(np.int64)
    firsts_B = (lengths_B - news_B) // chunk
    counts_B = (lengths_B - 1) // chunk - firsts_B + 1
    rows_C = np.repeat(np.arange(len(lengths_B)), counts_B)
    numbers_C = firsts_B[rows_C] + np.arange(len(rows_C)) - np.repeat(counts_B.cumsum() - counts_B, counts_B)
    starts_C = numbers_C * chunk
    ends_C = np.minimum(starts_C + chunk, lengths_B[rows_C])
    queries_C = (ends_C - np.maximum(starts_C, (lengths_B - news_B)[rows_C])).astype(np.int32)
    contexts_C = (ends_C - starts_C).astype(np.int32)
    device, width = batch.page_table_BP.device, batch.page_table_BP.shape[1]
    pages_CP = (starts_C // page_size)[:, None] + np.arange(min(width, chunk // page_size))
    rows_C1, pages_CP = (torch.from_numpy(one).to(device) for one in (rows_C[:, None], pages_CP.clip(max=width - 1)))
    return AttentionBatch(
        num_decodes=batch.num_decodes,
        page_table_BP=batch.page_table_BP[rows_C1, pages_CP],
        lengths_B=torch.from_numpy(contexts_C).to(device),
        query_starts_B1=torch.from_numpy(np.append(0, queries_C.cumsum()).astype(np.int32)).to(device),
        host_lengths=contexts_C,
        host_query_lengths=queries_C,
    )
