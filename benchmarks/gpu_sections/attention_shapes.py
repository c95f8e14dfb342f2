"""Two shapes of decode steps that the ``triton`` attention reads in a way of their own: rows that share a prefix, and
latents.  Each beside the same numbers in another way, and right beside float64.

Times are per layer and of the device alone.  'of plain' is the time of rows whose pages hold the same keys, but are not
shared, over this one's.  'of copy' counts the latents, each once.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from device_rates import copied_bytes_per_s

from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import callboard_attention_backend
from engine.plugins.support.paging import new_pool
from engine.plugins.testing.attention import through_hook
from gpu_sections.attention_triton import cannot_run
from gpu_sections.rows import CALLS, UNCACHED_BYTES, Row, device_seconds

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 32, 8, 128, 16  # those of Qwen3-8B
LATENT, ROTATED = 512, 64
BOUND = 2e-2  # of results around 1, in bfloat16


def shared(
    device: torch.device, sizes: Sequence[tuple[int, int, int]] = ((32, 2048, 128), (64, 2048, 128), (256, 1024, 64))
) -> Iterator[Row]:
    """Rows that share a prefix.  sizes: (rows, tokens that all share, tokens of their own)."""
    if rows := cannot_run(device):
        yield from rows
        return
    for num_rows, prefix, own in sizes:
        spec = AttentionSpec(2, HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
        common, each = prefix // PAGE_SIZE, own // PAGE_SIZE
        pool = new_pool(spec, num_rows * (common + each), PAGE_SIZE, torch.bfloat16, device)
        pool.data.normal_()
        pages = torch.arange(num_rows * (common + each), dtype=torch.int32, device=device).view(num_rows, -1)
        together = pages.clone()
        together[:, :common] = pages[0, :common]
        slots = _slots(pages)
        for layer in range(spec.num_layers):  # the same keys for all, in pages of their own
            for memory in (pool.keys(layer), pool.values(layer)):
                memory[slots[:, :prefix].flatten().long()] = memory[slots[0, :prefix].long()].repeat(num_rows, 1, 1)
        attention = through_hook(callboard_attention_backend)(spec, pool)
        q_TNH = torch.randn((num_rows, HEADS, HEAD_SIZE), device=device).bfloat16()
        found, seconds = [], []
        for table_BP in (pages, together):
            attention.plan_step(_decodes(table_BP, prefix + own, num_rows))
            found.append(attention.attend(0, q_TNH))
            seconds.append(_layer_seconds(attention, spec.num_layers, q_TNH))
        exact = _exact(pool, together, prefix + own, q_TNH, spec)
        error = max(float((one.double() - exact).abs().max()) for one in found)
        yield {
            "case": f"{num_rows} rows share {prefix} tokens, {own} of their own",
            "ok": error <= BOUND,
            "error": error,
            "us": seconds[1] * 1e6,
            "of_plain": seconds[0] / seconds[1],
        }


def latents(
    device: torch.device,
    sizes: Sequence[tuple[int, int, int]] = (
        *((heads, *size) for heads in (16, 128) for size in ((1, 4096), (8, 4096), (64, 4096), (128, 1024))),
    ),
) -> Iterator[Row]:
    """Decode steps over latents.  sizes: (query heads, rows, context)."""
    if rows := cannot_run(device):
        yield from rows
        return
    copied = copied_bytes_per_s(device)
    for num_heads, num_rows, context in sizes:
        num_bytes = num_rows * context * (LATENT + ROTATED) * 2
        num_layers = 1 + UNCACHED_BYTES // num_bytes if device.type == "cuda" else 1
        spec = AttentionSpec(num_layers, num_heads, 1, LATENT + ROTATED, 0.07, latent_size=LATENT)
        pool = new_pool(spec, num_rows * context // PAGE_SIZE, PAGE_SIZE, torch.bfloat16, device)
        pool.data.normal_()
        order = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(0))
        table_BP = order.to(device, torch.int32).view(num_rows, -1)
        attention = through_hook(callboard_attention_backend)(spec, pool)
        q_TNH = torch.randn((num_rows, num_heads, LATENT + ROTATED), device=device).bfloat16()
        attention.plan_step(_decodes(table_BP, context, num_rows))
        error = float((attention.attend(0, q_TNH).double() - _exact(pool, table_BP, context, q_TNH, spec)).abs().max())
        seconds = _layer_seconds(attention, num_layers, q_TNH)
        yield {
            "case": f"{num_heads} heads over latents, {num_rows} rows of {context}",
            "ok": error <= BOUND,
            "error": error,
            "us": seconds * 1e6,
            "gb_per_s": num_bytes / seconds / 1e9,
            "of_copy": num_bytes / seconds / copied,
        }


def _layer_seconds(attention: AttentionBackend, num_layers: int, q_TNH: torch.Tensor) -> float:
    def layers() -> None:
        for layer in range(num_layers):
            attention.attend(layer, q_TNH)

    return device_seconds(layers, q_TNH.device, max(2, CALLS // num_layers)) / num_layers


def _slots(table_BP: torch.Tensor) -> torch.Tensor:
    """Return the slots of each row's tokens in their order."""
    within = torch.arange(PAGE_SIZE, dtype=torch.int32, device=table_BP.device)
    return (table_BP[:, :, None] * PAGE_SIZE + within).flatten(1)


def _decodes(table_BP: torch.Tensor, context: int, num_rows: int) -> AttentionBatch:
    device = table_BP.device
    return AttentionBatch(
        num_decodes=num_rows,
        page_table_BP=table_BP,
        lengths_B=torch.full((num_rows,), context, dtype=torch.int32, device=device),
        query_starts_B1=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        host_lengths=np.full(num_rows, context, dtype=np.int32),
        host_query_lengths=np.ones(num_rows, dtype=np.int32),
    )


def _exact(
    pool: KVPool, table_BP: torch.Tensor, context: int, q_TNH: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Return the first layer's attention in float64, row by row."""
    slots, outs = _slots(table_BP)[:, :context].long(), []
    group = spec.num_heads // spec.num_kv_heads
    for row, q_NH in zip(slots, q_TNH.double(), strict=True):
        keys_NLH, values_NLH = (
            memory[row].double().transpose(0, 1).repeat_interleave(group, 0)
            for memory in (pool.keys(0), pool.values(0))
        )
        weights_NL = torch.softmax(torch.einsum("nh,nlh->nl", q_NH, keys_NLH) * spec.scale, -1)
        outs.append(torch.einsum("nl,nlh->nh", weights_NL, values_NLH))
    return torch.stack(outs)
