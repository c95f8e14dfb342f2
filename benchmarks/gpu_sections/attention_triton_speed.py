"""The triton attention backend's time beside dense attention by torch and beside the libraries that are installed.

Heads are those of Qwen3-0.6B and Qwen3-14B.  Times are per layer and of the device alone; keys come from memory, since
layers are many enough to fill no cache.  'of plain' is torch's time over this one's, where torch reads keys and values
that lie side by side, one length for all, which no server has.  'of copy' is the rate at which keys and values are read
over the rate of a large copy in the same run; queries and results, a few rows, are not counted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from device_rates import copied_bytes_per_s

from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.declaration import convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.testing.attention import through_hook
from engine.types.errors import PluginError
from gpu_sections.attention_triton import cannot_run
from gpu_sections.rows import CALLS, UNCACHED_BYTES, Row, device_seconds, skipped

NUM_KV_HEADS, HEAD_SIZE = 8, 128
HEADS = (16, 40)
PAGE_SIZES = (16, 64)
OTHERS = ("flashinfer", "flash_attn")
# The largest first: what the others need is cut from its memory, 8.6 GB.
DECODES = tuple((rows, context) for rows in (256, 32, 1) for context in (8192, 2048, 512))
PROMPTS = ((1, 8192), (1, 2048), (8, 512))


@dataclass(frozen=True)
class Size:
    """num_rows sequences of ``context`` tokens each: the last one new, or all of them.  page_size 0: no pages."""

    num_heads: int
    num_rows: int
    context: int
    prompt: bool
    page_size: int = 0

    @property
    def layer_bytes(self) -> int:
        """Of keys and values."""
        return self.num_rows * self.context * 2 * NUM_KV_HEADS * HEAD_SIZE * 2

    @property
    def prompt_operations(self) -> int:
        """Of a layer: two products of two operations per feature, for each pair of a token and one up to it."""
        return 4 * self.num_heads * HEAD_SIZE * self.num_rows * (self.context * (self.context + 1) // 2)

    def __str__(self) -> str:
        what = "prompts" if self.prompt else "rows"
        where = f"pages of {self.page_size}" if self.page_size else "no pages"
        return f"{self.num_heads}/{NUM_KV_HEADS} heads, {self.num_rows} {what} of {self.context}, {where}"


def decodes(device: torch.device, shapes: Sequence[tuple[int, int]] = DECODES) -> Iterator[Row]:
    """Steps of one new token per row.  shapes: (rows, context)."""
    return _compared([Size(num_heads, *one, prompt=False) for num_heads in HEADS for one in shapes], device)


def prompts(device: torch.device, shapes: Sequence[tuple[int, int]] = PROMPTS) -> Iterator[Row]:
    """Steps of whole prompts.  shapes: (prompts, tokens)."""
    return _compared([Size(num_heads, *one, prompt=True) for num_heads in HEADS for one in shapes], device)


def _compared(sizes: list[Size], device: torch.device) -> Iterator[Row]:
    """Rows of every size: torch's and ours, then each library's, which may take minutes to compile its kernels."""
    if rows := cannot_run(device):
        yield from rows
        return
    copied = copied_bytes_per_s(device)
    yield {"case": "copy", "ok": True, "gb_per_s": copied / 1e9}
    dense: dict[Size, float] = {}
    for size in sizes:
        dense[size] = _dense_seconds(size, device)
        yield _row(size, "torch, dense", dense[size], dense[size], copied)
    for name in ("triton", *OTHERS):
        for page_size in PAGE_SIZES:
            try:
                for size in sizes:
                    paged = replace(size, page_size=page_size)
                    yield _row(paged, name, _plugin_seconds(name, paged, device), dense[size], copied)
            except PluginError as error:
                skipped = f"skipped: {str(error)[:150]}"
                yield {"case": f"{name}, pages of {page_size}", "ok": name != "triton", "problem": skipped}


def tuning(
    device: torch.device, batches: Sequence[int] = (1, 16, 64, 256), contexts: Sequence[int] = (1024, 4096)
) -> Iterator[Row]:
    """Choose tiles for Qwen3-0.6B and keep them on disk; 'of plain' is the time of the default tiles over theirs."""
    if rows := cannot_run(device):
        yield from rows
        return
    if device.type == "cpu":
        yield skipped("the interpreter is not tuned")
        return
    # Here, because the sections above must be able to say that triton is not installed.
    from engine.plugins.attention.triton.backend import TritonAttention
    from engine.plugins.attention.triton.trials import tune

    for size in [Size(16, rows, context, False, 16) for rows in batches for context in contexts]:
        spec, pool = _spec_and_pool(size, device)
        attention = TritonAttention(spec, pool)
        default = _seconds(attention, size, spec, pool)
        tune(attention, (size.num_rows,), (size.context,))
        chosen = _seconds(attention, size, spec, pool)
        ok = chosen <= 1.25 * default  # they were chosen on ragged rows, these are equal
        yield {
            "case": f"{size}: {_tiles(attention._decode)}",
            "ok": ok,
            "us": chosen * 1e6,
            "of_plain": default / chosen,
        }


def _tiles(tiles: Any) -> str:
    return f"{tiles.block_keys} keys, {tiles.num_warps} warps, {tiles.num_stages} stages, {tiles.programs} programs"


def _spec_and_pool(size: Size, device: torch.device) -> tuple[AttentionSpec, KVPool]:
    num_pages = size.num_rows * -(-size.context // size.page_size)
    num_layers = _num_layers(size, device)
    spec = AttentionSpec(num_layers, size.num_heads, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)
    return spec, KVPool(num_layers, num_pages, size.page_size, NUM_KV_HEADS, HEAD_SIZE, torch.bfloat16, device)


def _num_layers(size: Size, device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return 1 + UNCACHED_BYTES // size.layer_bytes


def _plugin_seconds(name: str, size: Size, device: torch.device) -> float:
    plugin = import_module(f"engine.plugins.attention.{name}")
    wanted = AttentionContext(
        device=device.type,
        dtype="bfloat16",
        page_size=size.page_size,
        num_heads=size.num_heads,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
    )
    declaration = convert_declaration(name, plugin.CALLBOARD_PLUGIN)
    if name != "triton" and (misfits := declaration.misfits(wanted)):
        raise PluginError("; ".join(misfits))
    spec, pool = _spec_and_pool(size, device)
    pool.data.normal_()
    backend = through_hook(plugin.callboard_attention_backend)(spec, pool)
    return _seconds(backend, size, spec, pool)


def _row(size: Size, who: str, seconds: float, dense: float, copied: float) -> Row:
    """copied: bytes per second of a copy."""
    row = {"case": f"{size}: {who}", "ok": True, "us": seconds * 1e6, "of_plain": dense / seconds}
    if size.prompt:
        return {**row, "tflops": size.prompt_operations / seconds / 1e12}
    rate = size.layer_bytes / seconds
    return {**row, "gb_per_s": rate / 1e9, "of_copy": rate / copied}


def _seconds(backend: AttentionBackend, size: Size, spec: AttentionSpec, pool: KVPool) -> float:
    """Of one layer, over shuffled pages."""
    device, num_rows = pool.data.device, size.num_rows
    queries = size.context if size.prompt else 1
    table_P = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    backend.plan_step(
        AttentionBatch(
            num_decodes=0 if size.prompt else num_rows,
            page_table_BP=table_P.view(num_rows, -1),
            lengths_B=torch.full((num_rows,), size.context, dtype=torch.int32, device=device),
            query_starts_B1=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * queries,
            host_lengths=np.full(num_rows, size.context, dtype=np.int32),
            host_query_lengths=np.full(num_rows, queries, dtype=np.int32),
        )
    )
    q_TNH = torch.randn((num_rows * queries, size.num_heads, HEAD_SIZE), device=device).bfloat16()
    return _per_layer(lambda layer: backend.attend(layer, q_TNH), spec.num_layers, device)


def _dense_seconds(size: Size, device: torch.device) -> float:
    """The same numbers of queries and keys, every sequence's side by side."""
    num_layers = _num_layers(size, device)
    shape = (num_layers, 2, size.num_rows, NUM_KV_HEADS, size.context, HEAD_SIZE)
    data = torch.randn(shape, dtype=torch.bfloat16, device=device)
    queries = size.context if size.prompt else 1
    q_BNTH = torch.randn((size.num_rows, size.num_heads, queries, HEAD_SIZE), device=device).bfloat16()

    def attend(layer: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q_BNTH, data[layer, 0], data[layer, 1], is_causal=size.prompt, enable_gqa=True
        )

    return _per_layer(attend, num_layers, device)


def _per_layer(attend: Callable[[int], torch.Tensor], num_layers: int, device: torch.device) -> float:
    def work() -> None:
        for layer in range(num_layers):
            attend(layer)

    # Many layers make a graph long enough by themselves.
    return device_seconds(work, device, max(2, CALLS // num_layers)) / num_layers
