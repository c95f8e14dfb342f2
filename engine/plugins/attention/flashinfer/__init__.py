"""Attention by FlashInfer (https://github.com/flashinfer-ai/flashinfer), on NVIDIA GPUs from Ampere on.

    __init__.py   the hook: options, and refusals before the engine starts
    backend.py    the work of a step, eager or captured
    kernels.py    the calls into the library
    arguments.py  the arguments that all layers of a step share
    lists.py      the lists of a step's pages
    staging.py    page-locked memory, and when it may be rewritten

Importing this module does not import FlashInfer.
"""

import logging
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch

from engine.kernels.choice import choose_kernels
from engine.layers.attention import AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flashinfer.backend import BUFFERS, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import FA3_TILE, PagedAppend, Setup
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.hookspecs import AttentionContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.plugins.support.paging import windows_of
from engine.plugins.support.requirements import missing_package, require_capability, trial, try_out
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["flashinfer"],
    "devices": ["cuda"],
    "dtypes": ["bfloat16", "float16"],
    "head_sizes": [64, 128, 256],
    "kv_layouts": ["layer_first", "page_first"],
    "supports": ["layer_windows"],
    "kv_dtypes": ["fp8_e4m3"],
    "padding": True,
    "variants": [
        {"phase": "decode", "options": {"tensor_cores": "always"}},
        {"phase": "decode", "options": {"tensor_cores": "never"}},
        {"phase": "prefill", "options": {"prefill_backend": "fa2"}},
        {"phase": "prefill", "options": {"prefill_backend": "fa3"}},
    ],
}
PLUGIN = "attention.flashinfer"
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads per key head with a kernel without tensor cores
# From here on a group fills enough of a tensor core's tile; mini-sglang uses the same limit.
TENSOR_CORE_GROUP = 4
HOPPER = 9
PLANS_IN_A_STEP = 2  # decode rows and prefill segments, for every window


class FlashInferOptions(Options, frozen=True):
    """Options of the plugin.

    prefill_backend: kernels for prompts.  tensor_cores: whether decode rows use them.
    workspace_mb: for partial results; FlashInfer recommends 128 and fails with a message if it is too little."""

    prefill_backend: Literal["auto", "fa2", "fa3"] = "auto"
    tensor_cores: Literal["auto", "always", "never"] = "auto"
    workspace_mb: int = 128


@hookimpl
def callboard_attention_backend(context: AttentionContext) -> AttentionFactory:
    """Return the factory, for 16-bit models with heads of 64, 128 or 256; any page size and window; from Ampere on."""
    options = decode_options(PLUGIN, context.options, FlashInferOptions)
    tensor_cores = choose_tensor_cores(options, context.num_heads // context.num_kv_heads)
    try:
        library = import_module("flashinfer")
    except Exception as error:  # ImportError, or any error of its libraries for another CUDA
        raise missing_package(PLUGIN, "the package flashinfer-python", str(error)) from None
    capability = torch.cuda.get_device_capability()
    require_capability(PLUGIN, capability)
    if options.prefill_backend == "fa3" and capability[0] != HOPPER:
        raise PluginError(f"{PLUGIN}: prefill_backend='fa3' is for Hopper GPUs; set it to 'auto' or 'fa2'")
    if options.prefill_backend == "fa3" and context.kv_dtype:
        raise PluginError(
            f"{PLUGIN}: prefill_backend='fa3' does not read {context.kv_dtype} pages with queries in {context.dtype}; "
            "set it to 'auto' or 'fa2'"
        )
    prefill_backend = options.prefill_backend
    if prefill_backend == "auto" and capability[0] != HOPPER:
        prefill_backend = "fa2"
    return partial(_build, library, tensor_cores, prefill_backend, context.phases, options.workspace_mb << 20)


def choose_tensor_cores(options: FlashInferOptions, group: int) -> bool:
    """Whether decode rows of ``group`` query heads per key head use tensor cores.

    Raises PluginError if the option forbids them and there is no kernel without."""
    if options.tensor_cores == "never" and group not in CUDA_CORE_GROUPS:
        raise PluginError(
            f"{PLUGIN}: without tensor cores there are kernels for {', '.join(map(str, CUDA_CORE_GROUPS))} query "
            f"heads per key head; this model has {group}; set tensor_cores to 'auto'"
        )
    if options.tensor_cores != "auto":
        return options.tensor_cores == "always"
    return group >= TENSOR_CORE_GROUP or group not in CUDA_CORE_GROUPS


def _build(
    library: ModuleType,
    tensor_cores: bool,
    prefill_backend: str,
    phases: tuple[str, ...],
    workspace_bytes: int,
    spec: AttentionSpec,
    pool: KVPool,
) -> FlashInferAttention:
    device = pool.data.device
    setup = Setup(
        library=library,
        spec=spec,
        pool=pool,
        workspace=torch.zeros(workspace_bytes, dtype=torch.uint8, device=device),
        plans=StagingRing(BUFFERS * PLANS_IN_A_STEP * len(windows_of(spec)), device),
        tensor_cores=tensor_cores,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
    )
    attention = FlashInferAttention(setup, StagingRing(BUFFERS * PLANS_IN_A_STEP, device), prefill_backend, phases)
    log.info(
        "flashinfer %s: decode %s tensor cores, prefill %s; loading its kernels, which it may have to compile first",
        getattr(library, "__version__", "?"),
        "with" if tensor_cores else "without",
        prefill_backend,
    )
    # Both kernels that 'auto' may choose: few queries, and enough to fill the GPU.
    many = FA3_TILE * -(-setup.num_sms // spec.num_heads)
    for num_queries in (2, many) if prefill_backend == "auto" and "prefill" in phases else (2,):
        try_out(PLUGIN, attention, spec, pool, num_queries, phases)
    # With callboard's kernels, one kernel normalises, rotates and stores.  The library's does not round, and with
    # page-first pools a slot is not a position in a list of all pages.
    if choose_kernels(device) is None and pool.format.plain and pool.layout == "layer_first":
        store_by_library(library, pool)
    return attention


def store_by_library(library: ModuleType, pool: KVPool) -> None:
    """Make FlashInfer write the pool from now on.  Raises PluginError on failure; the pool is then unchanged."""
    append, device = PagedAppend(library, pool), pool.data.device
    with trial(PLUGIN, device):
        nothing_1GH = torch.zeros((1, *pool.keys(0).shape[1:]), dtype=pool.data.dtype, device=device)
        append(0, nothing_1GH, nothing_1GH, torch.tensor([pool.dump_page * pool.page_size], device=device))
    pool.store_by(append)
