"""Steps of random numbers in a model's shape, with which attention backends are timed and checked.

Legend: T new tokens of a step · N query heads · H head size
Owns: their sizes, the pool that they are in, the comparison of a result with the definition of attention.
Does not know: backends, clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.execution.device import free_bytes
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import Layout
from engine.plugins.declaration import Phase
from engine.plugins.proof.attention import TOLERANCES
from engine.plugins.proof.reference import attend
from engine.plugins.support.paging import batch_on, new_pool, page_bytes

POOL_BYTES = {"cuda": 4 << 30, "cpu": 128 << 20}
SHARE_OF_FREE = 4  # the pool takes one part of so many
COMPARED = 4  # tokens


@dataclass(frozen=True, slots=True)
class TrialLoad:
    """A step: sequences of ``context`` tokens each, of which ``new`` are computed."""

    phase: Phase
    rows: int
    context: int
    new: int

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages of all its sequences."""
        return self.rows * -(-self.context // page_size)

    def __str__(self) -> str:
        return f"{self.rows} x {self.context}" + (f", {self.new} new" if 1 < self.new < self.context else "")


def _loads(decodes: Sequence[tuple[int, int]], prefills: Sequence[tuple[int, int, int]]) -> tuple[TrialLoad, ...]:
    return (*(TrialLoad("decode", *one, 1) for one in decodes), *(TrialLoad("prefill", *one) for one in prefills))


LOADS = {
    "cuda": _loads(
        ((1, 1024), (8, 4096), (32, 2048), (128, 512)), ((1, 512, 512), (1, 4096, 4096), (1, 8192, 1024), (8, 512, 256))
    ),
    "cpu": _loads(((1, 256), (8, 256)), ((1, 128, 128), (1, 512, 64))),
}


def pool_bytes(
    spec: AttentionSpec, page_size: int, dtype: torch.dtype, loads: Sequence[TrialLoad], kv_dtype: str = ""
) -> int:
    """Return the bytes of a pool in which every step fits."""
    return max(one.num_pages(page_size) for one in loads) * page_bytes(spec, page_size, dtype, kv_dtype)


class TrialSteps:
    """Steps over one pool, which is as large as the largest of them needs, or as there is memory for.

    loads: the steps that fit into it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        loads: Sequence[TrialLoad],
        layout: Layout = "layer_first",
        kv_dtype: str = "",
    ) -> None:
        self.spec = spec
        self._page_size = page_size
        self._device = device
        room = min(POOL_BYTES[device.type], free_bytes(device) // SHARE_OF_FREE)
        most = max(1, room // page_bytes(spec, page_size, dtype, kv_dtype))
        num_pages = min(max(one.num_pages(page_size) for one in loads), most)
        self.pool = new_pool(spec, num_pages, page_size, dtype, device, layout, kv_dtype)
        self._fill(torch.Generator(device).manual_seed(0))
        self.loads = [one for one in loads if one.num_pages(page_size) <= num_pages]

    def queries(self, load: TrialLoad) -> Tensor:
        """Return q_TNH of a step."""
        shape = (load.rows * load.new, self.spec.num_heads, self.spec.head_size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self._device, self.pool.dtype)

    def batch(self, load: TrialLoad) -> AttentionBatch:
        """Return sequences over scattered pages that they do not share; decode rows have different lengths."""
        lengths = np.full(load.rows, load.context, dtype=np.int32)
        if load.phase == "decode":
            lengths = np.linspace(load.context, max(1, load.context // 4), load.rows).astype(np.int32)
        width = -(-load.context // self._page_size)
        pages = np.random.default_rng(0).permutation(self.pool.num_pages)[: load.rows * width]
        new = np.full(load.rows, load.new, dtype=np.int32)
        table_BP = pages.reshape(load.rows, width).astype(np.int32)
        return batch_on(self._device, load.rows if load.phase == "decode" else 0, table_BP, lengths, new)

    def compare(self, out_TNH: Tensor, q_TNH: Tensor, batch: AttentionBatch) -> None:
        """Compare the last sequence's result in the first layer with the definition; at most its last few tokens.
        Raises AssertionError."""
        last = len(batch.host_lengths) - 1
        length, new = int(batch.host_lengths[last]), min(COMPARED, int(batch.host_query_lengths[last]))
        position_L = torch.arange(length, device=self._device)
        pages_L = batch.page_table_BP[last].long()[position_L // self._page_size]
        slots_L = pages_L * self.pool.page_stride + position_L % self._page_size
        spec, sinks_N = self.spec, self.spec.sinks[0] if self.spec.sinks else None
        keys_LGH, values_LGH = self.pool.read(0, slots_L)
        expected = attend(
            q_TNH[-new:], keys_LGH, values_LGH, spec.scale, spec.window_of(0), spec.soft_cap, sinks_N, spec.chunked
        )
        absolute, relative = TOLERANCES[str(self.pool.dtype).removeprefix("torch.")]
        error = (out_TNH[-new:].double().cpu() - expected).abs()
        wrong = not (error <= absolute + relative * expected.abs()).all()  # NaN is wrong, too
        assert not wrong, f"a result at a context of {length} is off by {error.max():.3g}"

    def _fill(self, generator: torch.Generator) -> None:
        pool, spec = self.pool, self.spec
        pages_P = torch.arange(pool.num_pages + 1, device=self._device) * pool.page_stride
        slots_T = (pages_P[:, None] + torch.arange(pool.page_size, device=self._device)).flatten()
        shape = (2, len(slots_T), spec.num_kv_heads, spec.head_size)
        for layer in range(spec.num_layers):
            drawn = torch.randn(shape, generator=generator, dtype=pool.dtype, device=self._device)
            pool.store(layer, drawn[0], drawn[1], slots_T)
