"""Attention by FlashAttention: one call per layer for a step's decode rows, and one for its prompts.

Legend: T new tokens in the step · B sequences · D decode rows (the first D of B)
        P page-table width · N query heads · H head size
Owns: the work of a step, and the split of rows and layers.  Does not know: the kernels' arguments.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flash_attn.kernels import QUERY_TILE, CallPart, Kernels, Prepared
from engine.plugins.support.paging import (
    KVPages,
    padding_on_dump_page,
    pages_of,
    positive_lengths,
    variant_of,
    windows_of,
)

MASKED_QUERIES = 2


class FlashAttention:
    """An ``AttentionBackend`` that plans nothing on the host and never waits for the device.

    Decode rows and prompts are never in one call: a kernel for long queries wastes 127 of 128 rows of a tile on a
    decode row, and splitting the keys of one row would apply to all tokens of a prompt.  invariant: both are in one
    call, as prompts, so that a token's result is the same in every step.
    """

    capturable = True

    def __init__(self, spec: AttentionSpec, pool: KVPool, kernels: Kernels, invariant: bool = False) -> None:
        self._spec = spec
        self._invariant = invariant
        self._pool = pool
        self._kernels = kernels
        self._windows = windows_of(spec)
        self._firsts = {variant_of(spec, layer): layer for layer in reversed(range(spec.num_layers))}
        self._pages = rotated_and_latents(pool, spec) if spec.latent_size else pages_of(pool)
        self._parts: list[CallPart] = []
        self._prepared: dict[int, list[Prepared]] = {}

    def plan_step(self, batch: AttentionBatch) -> None:
        """Split the batch into parts."""
        self._parts = cut(batch, self._spec, self._pool, self._invariant)
        self._prepared = {}

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        outs = [out_TNH for _, out_TNH in self._results(layer, q_TNH)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Write one layer's result to out_TNH: the libraries allocate their results, so each part is copied."""
        for rows, part_TNH in self._results(layer, q_TNH):
            out_TNH[rows] = part_TNH

    def _results(self, layer: int, q_TNH: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each part, and its result."""
        variant = variant_of(self._spec, layer)
        if layer == self._firsts[variant]:
            # Here, so that a graph repeats it: it runs on the device, on the lengths that a step has there.
            self._prepared[variant] = [self._kernels.prepare(part, self._windows[variant]) for part in self._parts]
        first = 0
        for part, prepared in zip(self._parts, self._prepared[variant], strict=True):
            last = first + len(part.lengths_B) if part.decode else len(q_TNH)
            yield slice(first, last), self._kernels.run(layer, q_TNH[first:last], self._pages[layer], part, prepared)
            first = last


def rotated_and_latents(pool: KVPool, spec: AttentionSpec) -> list[KVPages]:
    """Return, per layer, the rotated part of each latent as the key, and the rest of it as the value."""
    return [(layer[0][..., spec.latent_size :], layer[0][..., : spec.latent_size]) for layer in pool.data.unbind(0)]


def cut(batch: AttentionBatch, spec: AttentionSpec, pool: KVPool, invariant: bool = False) -> list[CallPart]:
    """Return the decode rows and the prompts of a step as parts, at least one.  invariant: all in one, as prompts."""
    count, parts = 0 if invariant else batch.num_decodes, []
    table_BP, lengths_B = padding_on_dump_page(batch, pool), positive_lengths(batch)
    if count:
        parts.append(
            CallPart(
                decode=True,
                page_table_BP=table_BP[:count],
                lengths_B=lengths_B[:count],
                query_starts_B1=batch.query_starts_B1[: count + 1],
                max_queries=1,
                max_length=int(batch.host_lengths[:count].max()),
                num_tiles=count * spec.num_kv_heads,
            )
        )
    if count < len(batch.host_lengths):
        query_lengths = batch.host_query_lengths[count:]
        num_tiles = -(-query_lengths * (spec.num_heads // spec.num_kv_heads) // QUERY_TILE)
        parts.append(
            CallPart(
                decode=False,
                page_table_BP=table_BP[count:],
                lengths_B=lengths_B[count:],
                # Every decode row has one query, so the host knows where the prompts start.
                query_starts_B1=batch.query_starts_B1[count:] - count,
                # FA3 may use another kernel, without a mask, if no sequence has more than one query.
                max_queries=max(int(query_lengths.max()), MASKED_QUERIES if invariant else 1),
                max_length=int(batch.host_lengths[count:].max()),
                num_tiles=int(num_tiles.sum()) * spec.num_kv_heads,
            )
        )
    return parts
