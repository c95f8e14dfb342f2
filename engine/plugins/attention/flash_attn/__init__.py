"""Attention by FlashAttention (https://github.com/Dao-AILab/flash-attention): FA3 on Hopper, else FA2.

    __init__.py    the hook: options, and refusals before the engine starts
    backend.py     the work of a step, eager or captured
    kernels.py     the calls into the libraries
    libraries.py   the available builds, and their rules

Importing this module does not import FlashAttention.
"""

import logging
from functools import partial
from typing import Literal

import torch

from engine.layers.attention import AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flash_attn.backend import FlashAttention
from engine.plugins.attention.flash_attn.kernels import FA2, FA3, QUERY_TILE, Kernels
from engine.plugins.attention.flash_attn.libraries import FA2_PAGE, HOPPER, Library, Situation, find
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.requirements import ANYTHING_ELSE, require_capability, try_out
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["flash_attn | flash_attn_interface | flash_attn_3 | sgl_kernel"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16", "float16"],
    "head_sizes": {"multiple_of": 8, "at_most": 256},
    "kv_layouts": ["layer_first", "page_first"],
    "supports": ["layer_windows", "latents", "sinks"],
    "latent_sizes": [[512, 64], [256, 64]],
    "kv_dtypes": ["fp8_e4m3"],
    "rounded_queries": ["fp8_e4m3"],
    "padding": True,
    "invariant": True,
}
PLUGIN = "attention.flash_attn"
GENERATIONS = {"auto": (3, 2), "fa3": (3,), "fa2": (2,)}


class FlashAttentionOptions(Options, frozen=True):
    """Options of the plugin.

    implementation: the generation to use.  whole_pages: let FA3 read whole pages, as described in ``refusal``."""

    implementation: Literal["auto", "fa3", "fa2"] = "auto"
    whole_pages: bool = False


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for 16-bit models with heads of up to 256.

    FA3 serves pages below 128 tokens, also in float8, and below 64 with latents; FA2 serves pages of a multiple of
    256.  Of FA3's builds SGLang's has sinks."""
    options = decode_options(PLUGIN, context.options, FlashAttentionOptions)
    capability = torch.cuda.get_device_capability()
    require_capability(PLUGIN, capability)
    situation = Situation(
        capability[0] == HOPPER,
        context.page_size,
        context.head_size,
        options.whole_pages,
        context.kv_dtype,
        context.invariant,
        bool(context.window),
        context.needs,
    )
    library, reasons = find(GENERATIONS[options.implementation], situation)
    if library is None:
        instead = "triton" if context.invariant else f"flashinfer, {ANYTHING_ELSE}"
        raise PluginError(
            f"{PLUGIN} finds no FlashAttention for kv.page_size={context.page_size}: {'; '.join(reasons)}. "
            "FA3 comes with sgl-kernel or flash-attn-3, FA2 with "
            "pip install --no-build-isolation 'callboard[flash-attn]'; set kv.page_size to "
            f"16, 32 or 64 for FA3, or to {FA2_PAGE} for FA2; or set plugins.attention={instead}"
        )
    return partial(_build, library, context.phases, context.invariant)


def _build(
    library: Library, phases: tuple[str, ...], invariant: bool, spec: AttentionSpec, pool: KVPool
) -> FlashAttention:
    num_sms = torch.cuda.get_device_properties(pool.data.device).multi_processor_count
    kernels: Kernels
    if library.varlen is not None:
        kernels = FA2(spec, library.with_kvcache, library.varlen)
    else:
        kernels = FA3(spec, pool, num_sms, library.with_kvcache, library.scheduler_metadata, invariant)
    attention = FlashAttention(spec, pool, kernels, invariant)
    log.info("FlashAttention %d: %s %s", library.generation, library.module, library.version)
    # Few queries, whose keys are split, and enough to fill the GPU, whose keys are not.
    many = QUERY_TILE * -(-num_sms // spec.num_heads)
    for num_queries in (2, many) if "prefill" in phases else (2,):
        try_out(PLUGIN, attention, spec, pool, num_queries, phases)
    return attention
