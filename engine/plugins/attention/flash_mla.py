"""Decode rows over latents by FlashMLA (https://github.com/deepseek-ai/FlashMLA), for Hopper GPUs.

Legend: B decode rows · P page-table width · N query heads · H head size
Owns: the hook, refusals before the engine starts, the call.  Does not know: prompts, which it does not serve.

It plans nothing on the host: the first call of a step divides the rows' keys among processors, on the device, and the
calls of other layers read that.  SGLang's kernels have the same two functions.
Importing this module does not import FlashMLA.
"""

import logging
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionBatch, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.paging import padding_on_dump_page, positive_lengths
from engine.plugins.support.requirements import ANYTHING_ELSE, try_out
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["flash_mla | sgl_kernel"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16", "float16"],
    "head_sizes": [576],  # so that models without latents pass it over
    "page_sizes": [64],
    "kv_layouts": ["layer_first", "page_first"],
    "supports": ["latents"],
    "latent_sizes": [[512, 64]],
    "phases": ["decode"],
    "window": False,
    "padding": True,
}
PLUGIN = "attention.flash_mla"
MODULES = ("flash_mla", "sgl_kernel.flash_mla")
HOPPER = 9


class FlashMLAAttention:
    """An ``AttentionBackend`` for decode rows alone; it plans nothing and never waits for the device."""

    capturable = True

    def __init__(self, library: ModuleType, spec: AttentionSpec, pool: KVPool) -> None:
        self._library = library
        self._spec = spec
        self._pool = pool
        self._pages = [layer[0] for layer in pool.data.unbind(0)]
        self._table_BP = torch.empty((0, 0), dtype=torch.int32, device=pool.data.device)
        self._lengths_B = self._table_BP[:, 0:0].flatten()
        self._division: Any = None

    def plan_step(self, batch: AttentionBatch) -> None:
        """Keep the batch's page table and lengths, with padding rows on the dump page."""
        assert batch.num_decodes == len(batch.host_lengths), f"{batch.num_decodes} of {len(batch.host_lengths)} decode"
        self._table_BP = padding_on_dump_page(batch, self._pool)
        self._lengths_B = positive_lengths(batch)
        self._division = None

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Return out_TNH of one layer."""
        if layer == 0 or self._division is None:
            # An empty one, which the call fills: here, so that a graph divides each step's keys.
            self._division, _ = self._library.get_mla_metadata()
        out_T1NH, _ = self._library.flash_mla_with_kvcache(
            q_TNH[:, None],
            self._pages[layer],
            block_table=self._table_BP,
            cache_seqlens=self._lengths_B,
            head_dim_v=self._spec.latent_size,
            tile_scheduler_metadata=self._division,
            softmax_scale=self._spec.scale,
        )
        out_TNH: Tensor = out_T1NH[:, 0]
        return out_TNH


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for decode rows over latents of 512 + 64 numbers in pages of 64 tokens, on Hopper GPUs."""
    decode_options(PLUGIN, context.options, Options)
    if "latents" not in context.needs:
        raise PluginError(f"{PLUGIN} is for models with latent attention; set plugins.attention=auto")
    major, minor = torch.cuda.get_device_capability()
    if major != HOPPER:
        raise PluginError(f"{PLUGIN} needs compute capability 9.0, this GPU has {major}.{minor}; {ANYTHING_ELSE[3:]}")
    library = _library()

    def build(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        attention = FlashMLAAttention(library, spec, pool)
        log.info("flash_mla: decode rows by %s", library.__name__)
        try_out(PLUGIN, attention, spec, pool, num_queries=1, phases=("decode",))
        return attention

    return build


def _library() -> ModuleType:
    """Return the first module that has the functions.  Raises PluginError with the reasons against each."""
    reasons = []
    for name in MODULES:
        try:
            module = import_module(name)
            if callable(module.get_mla_metadata) and callable(module.flash_mla_with_kvcache):
                return module
        except Exception as error:  # ImportError, or any error of its libraries for another CUDA
            reasons.append(f"{name}: {' '.join(str(error).split())[:200]}")
    raise PluginError(
        f"{PLUGIN} finds no FlashMLA ({'; '.join(reasons)}); it is built from github.com/deepseek-ai/FlashMLA, and "
        f"comes with sglang-kernel; {ANYTHING_ELSE[3:]}"
    )
