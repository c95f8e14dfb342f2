"""The triton backend: this project's own kernels, for NVIDIA GPUs of compute capability 8.0 and later.

Owns: what it refuses, its option.  The kernels are in ``triton_kernels``, imported once this backend is chosen.

Under TRITON_INTERPRET=1, set before Python starts, the kernels run on the CPU, thousands of times slower: to test them.
"""

import torch

from engine.layers.attention import AttentionBackend, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.requirements import missing_package, require_capability, try_out
from engine.types.errors import PluginError

PLUGIN = "attention.triton"
CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["triton"],
    "devices": ["cuda"],
    "dtypes": ["float32", "bfloat16", "float16"],
    "head_sizes": {"multiple_of": 8, "at_most": 256},
    "heads_per_kv_head": {"multiple_of": 1, "at_most": 64},
    "kv_layouts": ["layer_first", "page_first"],
    "kv_dtypes": ["fp8_e4m3"],
    "supports": ["soft_cap", "sinks", "layer_windows", "latents"],
    "padding": True,
    "invariant": True,
}

FLOAT8_CAPABILITY = (8, 9)  # Ada: the first with instructions that turn e4m3 into other types
MAX_LATENT = 512  # of which a tile, and a program's results, still fit


class TritonOptions(Options, frozen=True):
    """tune: measure at start which tiles are fastest for this model here, once; the file with the result is read by
    every later start, with the option or without, but for invariant numerics."""

    tune: bool = False


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Any page size and window; on NVIDIA GPUs, and for tests of the kernels on the CPU."""
    options = decode_options(PLUGIN, context.options, TritonOptions)
    if context.invariant and options.tune:
        raise PluginError(
            f"{PLUGIN}: tiles that were measured may be others at the next start, with other bits; set its option "
            "tune=false, or model.numerics=fast"
        )
    if context.device == "cuda":
        capability = torch.cuda.get_device_capability()
        require_capability(PLUGIN, capability)
        if context.kv_dtype and capability < FLOAT8_CAPABILITY:
            raise PluginError(
                f"{PLUGIN} reads {context.kv_dtype} pages from compute capability 8.9 on, this GPU has "
                f"{capability[0]}.{capability[1]}; set plugins.attention=flashinfer, or kv.dtype=auto"
            )
    try:
        from engine.plugins.attention.triton.backend import TritonAttention
        from engine.plugins.attention.triton.trials import tune, use_known
    except ImportError as error:
        raise missing_package(PLUGIN, "triton", str(error)) from error

    def build(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        if spec.latent_size > MAX_LATENT or spec.latent_size % 8:
            raise PluginError(
                f"{PLUGIN}: latents of {spec.latent_size} numbers, it takes multiples of 8 up to {MAX_LATENT}"
            )
        attention = TritonAttention(spec, pool, invariant=context.invariant)
        if context.device == "cuda":
            try_out(PLUGIN, attention, spec, pool, num_queries=16)  # compiles the kernels
        if options.tune:
            tune(attention)
        elif not context.invariant:
            use_known(attention)
        return attention

    return build
