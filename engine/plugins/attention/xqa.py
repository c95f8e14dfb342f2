"""Decode rows by XQA, NVIDIA's kernel for few queries of many heads, in FlashInfer; for GPUs from Hopper on.

Legend: B decode rows · P page-table width · N query heads · H head size
Owns: the hook, refusals before the engine starts, the call.  Does not know: prompts, which it does not serve.

It plans nothing: the kernel reads page tables and lengths on the device.  On Hopper, FlashInfer's
``trtllm_batch_decode_with_kv_cache`` calls it too.  Whether it is the fastest for a model's heads is measured at start.
Importing this module does not import FlashInfer.
"""

import logging
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.paging import padding_on_dump_page, pages_of, positive_lengths
from engine.plugins.support.requirements import ANYTHING_ELSE, missing_package, try_out
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["flashinfer"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16", "float16"],
    "head_sizes": [64, 128, 256],
    "page_sizes": [16, 32, 64, 128],
    "heads_per_kv_head": {"multiple_of": 1, "at_most": 16},
    "kv_layouts": ["layer_first", "page_first"],
    "supports": ["layer_windows"],
    "phases": ["decode"],
    "padding": True,
}
PLUGIN = "attention.xqa"
HOPPER = 9
SEMAPHORE_BYTES = 8 << 20  # at the start of the workspace, zero at first; the kernel leaves them zero
# Partial results of rows: at most one per processor, of 16 heads of 256 numbers, with room to spare.
PART_BYTES = 24 << 20


class XQAAttention:
    """An ``AttentionBackend`` for decode rows alone; it plans nothing and never waits for the device."""

    capturable = True

    def __init__(self, library: ModuleType, spec: AttentionSpec, pool: KVPool) -> None:
        device = pool.data.device
        self._decode = library.decode.xqa_batch_decode_with_kv_cache
        self._spec = spec
        self._pool = pool
        self._pages = pages_of(pool)
        self._workspace = torch.zeros(SEMAPHORE_BYTES + PART_BYTES, dtype=torch.uint8, device=device)
        self._table_BP = self._dense_BP = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._lengths_B = self._table_BP[:, 0:0].flatten()

    def plan_step(self, batch: AttentionBatch) -> None:
        """Keep the batch's page table and lengths, with padding rows on the dump page."""
        assert batch.num_decodes == len(batch.host_lengths), f"{batch.num_decodes} of {len(batch.host_lengths)} decode"
        self._table_BP = padding_on_dump_page(batch, self._pool)
        self._lengths_B = positive_lengths(batch)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        self.attend_into(layer, q_TNH, out_TNH)
        return out_TNH

    def attend_into(self, layer: int, q_TNH: Tensor, out_TNH: Tensor) -> None:
        """Write one layer's result to out_TNH."""
        if layer == 0:
            # The kernel needs contiguous rows.  The copy is made here, so that a graph copies each step's tables.
            self._dense_BP = self._table_BP.contiguous()
        window = self._spec.window_of(layer)
        self._decode(
            q_TNH.contiguous(),
            self._pages[layer],
            self._workspace,
            self._dense_BP,
            self._lengths_B,
            self._dense_BP.shape[1] * self._pool.page_size,
            bmm1_scale=self._spec.scale,
            bmm2_scale=1.0,
            # The query's own position is not counted, and -1 is no limit.
            window_left=window - 1,
            out=out_TNH,
            kv_layout="NHD",
        )


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for decode rows of 16-bit models, pages of 16 to 128 tokens, up to 16 query heads per KV head
    and Hopper GPUs."""
    decode_options(PLUGIN, context.options, Options)
    major, minor = torch.cuda.get_device_capability()
    if major < HOPPER:
        raise PluginError(f"{PLUGIN} needs compute capability 9.0, this GPU has {major}.{minor}; {ANYTHING_ELSE[3:]}")
    try:
        library = import_module("flashinfer")
    except Exception as error:  # ImportError, or any error of its libraries for another CUDA
        raise missing_package(PLUGIN, "the package flashinfer-python", str(error)) from None

    def build(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        attention = XQAAttention(library, spec, pool)
        log.info("xqa of flashinfer %s: loading its kernel, which it may have to compile", library.__version__)
        try_out(PLUGIN, attention, spec, pool, num_queries=1, phases=("decode",))
        return attention

    return build
