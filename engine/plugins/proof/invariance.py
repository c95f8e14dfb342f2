"""Checks that a token's attention has the same bits however its sequence is cut into steps, and in any batch.

Legend: T new tokens in the step · L positions of a sequence · N query heads · G KV heads · H head size · P pages
Owns: sequences of random numbers, cut in two ways.  Does not know: kernels, the correct results.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.support.paging import batch_on, windows_of

# For each sequence, its tokens in each step: long chunks, single tokens, and chunks with arbitrary starts.
CUTS = ((37, 128, 1, 1, 1, 3, 100, 29), (150, *[1] * 12), (1, 1, 127, 2, 1), (4, 8, 1, 16, 11), (200, 1, 60, 1, 5))
LENGTHS = tuple(map(sum, CUTS))
NAN_BYTE = 0xFF  # a number of these bytes is NaN in every type, and so is a scale


def pages_needed(page_size: int) -> int:
    """Return the number of pages for all sequences at once."""
    return sum(-(-length // page_size) for length in LENGTHS)


def layers_needed(spec: AttentionSpec) -> int:
    """Return the number of layers with which there is one of each kind."""
    return max(_layers(spec)) + 1


@torch.inference_mode()
def require_same_bits(backend: AttentionBackend, spec: AttentionSpec, pool: KVPool) -> None:
    """Compare sequences computed alone and at once with the same ones cut into shared steps.

    pool: with enough pages and layers.  Raises AssertionError with the first difference."""
    generator = torch.Generator().manual_seed(2)
    width = spec.num_heads + 2 * spec.num_kv_heads
    sequences = [torch.randn((length, width, spec.head_size), generator=generator) for length in LENGTHS]
    sequences = [one.to(pool.data.device, pool.dtype) for one in sequences]
    pages = torch.randperm(pages_needed(pool.page_size), generator=generator).tolist()
    for layer in _layers(spec):
        alone = [_results(backend, spec, pool, layer, [one], [(len(one),)], sorted(pages))[0] for one in sequences]
        shared = _results(backend, spec, pool, layer, sequences, CUTS, pages)
        for number, (expected_LNH, found_LNH) in enumerate(zip(alone, shared, strict=True)):
            differing = (expected_LNH != found_LNH).flatten(1).any(1).nonzero().flatten().tolist()
            assert not differing, (
                f"layer {layer}, sequence {number} of {len(expected_LNH)} tokens: {len(differing)} of them, position "
                f"{differing[0]} first, have other bits in steps of {CUTS[number]} tokens than alone and at once"
            )


def _layers(spec: AttentionSpec) -> list[int]:
    """Return the first layer of each window."""
    windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
    return [windows.index(window) for window in windows_of(spec) if window in windows]


def _results(
    backend: AttentionBackend,
    spec: AttentionSpec,
    pool: KVPool,
    layer: int,
    sequences: Sequence[Tensor],
    cuts: Sequence[Sequence[int]],
    pages: list[int],
) -> list[Tensor]:
    """Return out_LNH of each sequence.  sequences: queries, keys and values of each position."""
    pool.data.view(torch.uint8).fill_(NAN_BYTE)
    page_size, queries = pool.page_size, spec.num_heads
    counts = [-(-len(one) // page_size) for one in sequences]
    table_BP = np.zeros((len(sequences), max(counts)), dtype=np.int32)
    for row, count in enumerate(counts):
        table_BP[row, :count], pages = pages[:count], pages[count:]
    done = [0] * len(sequences)
    outs: list[list[Tensor]] = [[] for _ in sequences]
    for number in range(max(map(len, cuts))):
        sizes = {row: cut[number] for row, cut in enumerate(cuts) if number < len(cut)}
        rows = sorted(sizes, key=lambda row: sizes[row] > 1)  # decodes come first
        lengths = np.array([done[row] + sizes[row] for row in rows], dtype=np.int32)
        query_lengths = np.array([sizes[row] for row in rows], dtype=np.int32)
        new = [sequences[row][done[row] : done[row] + sizes[row]] for row in rows]
        for row, part in zip(rows, new, strict=True):
            position = np.arange(done[row], done[row] + sizes[row])
            slots = table_BP[row, position // page_size].astype(np.int64) * pool.page_stride + position % page_size
            keys, values = part[:, queries:].chunk(2, 1)
            pool.store(layer, keys, values, torch.from_numpy(slots).to(pool.data.device))
        num_decodes = int((query_lengths == 1).sum())
        backend.plan_step(batch_on(pool.data.device, num_decodes, table_BP[rows], lengths, query_lengths))
        out_TNH = backend.attend(layer, torch.cat(new)[:, :queries])
        for row, part in zip(rows, torch.split(out_TNH, query_lengths.tolist()), strict=True):
            outs[row].append(part)
            done[row] += sizes[row]
    return [torch.cat(parts) for parts in outs]
