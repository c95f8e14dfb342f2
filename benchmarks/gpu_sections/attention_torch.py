"""The torch attention backend next to attention as it is defined."""

import numpy as np
import torch

from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.torch import TorchAttention
from gpu_sections.rows import Row, seconds_of


def attention(device: torch.device) -> list[Row]:
    """The torch backend in each dtype: a mixed batch over shuffled pages, against float64 on the CPU."""
    rows = []
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for heads, kv_heads, window in ((16, 8, 0), (40, 8, 0), (4, 4, 33)):
            error, seconds = _attention_case(device, dtype, heads, kv_heads, window)
            name = f"torch {str(dtype).removeprefix('torch.')} {heads}/{kv_heads} window {window}"
            rows.append({"case": name, "ok": error <= bound, "error": error, "us": seconds * 1e6})
    return rows


def _attention_case(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, window: int
) -> tuple[float, float]:
    page_size, head_size = 16, 128
    queries, lengths = [1, 1, 1, 40, 7], [1, 16, 300, 40, 100]
    generator = torch.Generator().manual_seed(heads + window)
    num_pages = sum(-(-length // page_size) for length in lengths)
    pool = KVPool(1, num_pages, page_size, kv_heads, head_size, dtype, device)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.zeros((len(lengths), -(-max(lengths) // page_size)), dtype=torch.int32)
    for row, length in enumerate(lengths):
        own = [order.pop() for _ in range(-(-length // page_size))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    starts = [0, *np.cumsum(queries).tolist()]
    q_TNH = torch.randn((starts[-1], heads, head_size), generator=generator).to(device, dtype)
    spec = AttentionSpec(1, heads, kv_heads, head_size, head_size**-0.5, window)
    backend = TorchAttention(spec, pool)
    backend.plan_step(
        AttentionBatch(
            num_decodes=3,
            page_table_BP=table.to(device),
            lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
            query_starts_B1=torch.tensor(starts, dtype=torch.int32, device=device),
            host_lengths=np.array(lengths, dtype=np.int32),
            host_query_lengths=np.array(queries, dtype=np.int32),
        )
    )
    out = backend.attend(0, q_TNH).double().cpu()
    keys, values = (slots.double().cpu() for slots in (pool.keys(0), pool.values(0)))
    error = 0.0
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = table[row, positions // page_size].long() * page_size + positions % page_size
        q_nNH = q_TNH[starts[row] : starts[row + 1]].double().cpu()
        expected = _by_definition(q_nNH, keys[slots], values[slots], head_size**-0.5, window)
        error = max(error, (out[starts[row] : starts[row + 1]] - expected).abs().max().item())
    return error, seconds_of(lambda: backend.attend(0, q_TNH), device)


def _by_definition(
    q_nNH: torch.Tensor, k_LGH: torch.Tensor, v_LGH: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """softmax(q k^T) v in float64; the queries are the last positions."""
    group = q_nNH.shape[1] // k_LGH.shape[1]
    k_LNH, v_LNH = k_LGH.repeat_interleave(group, 1), v_LGH.repeat_interleave(group, 1)
    query = torch.arange(len(k_LGH) - len(q_nNH), len(k_LGH))[:, None]
    key = torch.arange(len(k_LGH))[None]
    hidden = (key > query) | ((key <= query - window) if window else torch.zeros_like(key > query))
    scores = torch.einsum("nhd,lhd->hnl", q_nNH, k_LNH).mul(scale).masked_fill(hidden, -torch.inf)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v_LNH)
