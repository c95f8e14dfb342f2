"""The triton backend: this project's own kernels, for NVIDIA GPUs of compute capability 8.0 and later.

Owns: its refusals and its option.  The kernels' modules are imported only if this backend is chosen.

Under TRITON_INTERPRET=1, set before Python starts, the kernels run on the CPU, thousands of times slower, for tests.
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

FLOAT8_CAPABILITY = (8, 9)  # Ada, the first with instructions that convert e4m3 to other types
MAX_LATENT = 512  # the largest whose tile, and a program's results, fit


class TritonOptions(Options, frozen=True):
    """Options of the plugin.

    tune: measure once, at start, which tiles are fastest for this model here; every later start reads the file with the
    result, with the option or without, except with invariant numerics."""

    tune: bool = False


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for any page size and window, on NVIDIA GPUs; and on the CPU for tests of the kernels."""
    options = decode_options(PLUGIN, context.options, TritonOptions)
    if context.invariant and options.tune:
        raise PluginError(
            f"{PLUGIN}: measured tiles may differ at the next start, and with them the bits; set its option "
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
