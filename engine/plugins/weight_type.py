"""The type that a model's weights have while it runs: what "auto" means, and whether experts stay as they are stored.

Owns: the choice by checkpoint and device, and its refusals.  Does not know: torch, how weights are multiplied.
"""

import logging
from dataclasses import replace

import msgspec

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.quantization import MXFP4, MXFP4_GROUP
from engine.checkpoints.shape import ExpertsShape
from engine.config import Config
from engine.host.device_defaults import gpu_generation, multiplies_float8_blocks, runs_on_cpu
from engine.plugins.hookspecs import LinearContext
from engine.plugins.kinds import LINEAR, chosen_plugins
from engine.plugins.linears import fitting_linears, keeping, linear_context
from engine.plugins.manager import Plugins
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

HOPPER = 9  # the generation of GPUs that multiplies float8 with every kind of scales
# Of hidden states: products of smaller models take longer in float8 than in bfloat16 (docs/performance.md).
FLOAT8_WIDTH = 2048
FLOAT8_BLOCK = (128, 128)  # of weights that share a scale, for the kernel of experts


def with_weight_type(config: Config, model: ModelSpec) -> tuple[Config, ModelSpec]:
    """Return the configuration with 'auto' replaced in ``model.quantization``, and the model as it is then.

    Raises ConfigError for 4 bits where experts cannot stay so."""
    wanted = config.model.quantization
    if wanted == "auto":
        wanted = _automatic(config, model)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, quantization=wanted))
    if wanted == "fp8" and not (why_not := widens_experts(config, model)):
        return config, msgspec.structs.replace(model, shape=model.shape.with_experts(float8=True))
    if wanted != MXFP4:
        return config, model
    if why_not := needs_floats(config, model):
        raise ConfigError(f'model.quantization="{MXFP4}": {why_not}; set it to "auto"')
    return config, msgspec.structs.replace(model, shape=model.shape.with_experts(four_bits=True))


def _automatic(config: Config, model: ModelSpec) -> str:
    """Return what 'auto' stands for, and log it where there is a choice."""
    stored = model.quantization
    if stored is None:
        return "none"
    if stored.method == MXFP4:
        why_not = needs_floats(config, model)
        reason = why_not or "a kernel multiplies by experts as they are stored"
        kept = "none" if why_not else MXFP4
    elif stored.is_float8 and not runs_on_cpu(config.device.kind) and gpu_generation() == HOPPER:
        small = model.shape.hidden_size < FLOAT8_WIDTH
        reason = f"{stored} with {stored.scales}{', small' if small else ''}"
        can = not small and (stored.block[0] <= 1 or multiplies_float8_blocks())
        kept = kept_type(Plugins(chosen_plugins(config)), _float8_context(config, model)) if can else "none"
    else:
        return "none"
    log.info("auto: model.quantization=%s (%s)", kept, reason)
    return kept


def _float8_context(config: Config, model: ModelSpec) -> LinearContext:
    dtype = config.model.dtype if config.model.dtype != "auto" else model.dtype
    context = linear_context(
        config, device="cuda", scale_block=None if model.quantization is None else model.quantization.block
    )
    # 'auto' widens a checkpoint of float32 to bfloat16 on a GPU.
    return replace(context, dtype="bfloat16" if dtype == "float32" else dtype)


def kept_type(plugins: Plugins, context: LinearContext) -> str:
    """Return 'fp8' if a built-in kernel multiplies by the checkpoint's elements in float8 as they are, else 'none'."""
    wanted = replace(context, quantization="fp8")
    if wanted.scale_block is None or plugins.names.get(LINEAR) is not None:
        return "none"
    fitting = [info.short for info in fitting_linears(plugins.known, wanted)]
    return "fp8" if keeping(plugins.known, fitting, wanted) else "none"


def needs_floats(config: Config, model: ModelSpec) -> str:
    """Return why a model's experts cannot stay in the 4 bits of MXFP4, '' if they can."""
    if model.quantization is None or model.quantization.method != MXFP4:
        return "the checkpoint does not store its weights so"
    if runs_on_cpu(config.device.kind):
        return "on a CPU linear.blocks keeps experts as they are stored, with 'none' and 'int8'"
    experts = model.shape.experts
    if not experts or not all(map(_has_a_kernel, experts)):
        return "the kernel is for the experts of gpt-oss"
    dtype, ranks = config.model.dtype, config.device.tensor_parallel
    if dtype == "auto":
        dtype = "float16" if model.dtype == "float16" else "bfloat16"
    if dtype != "bfloat16":
        return f"the kernel computes in bfloat16, not in {dtype}"
    for size in (model.shape.hidden_size, *(one.expert_size for one in experts)):
        if size % MXFP4_GROUP:
            return f"{MXFP4_GROUP} inputs share a scale, and {size} is no multiple of that"
    if config.model.experts == "cut" and any(one.expert_size % (MXFP4_GROUP * ranks) for one in experts):
        return f'{ranks} ranks would cut groups of inputs that share a scale; model.experts="divided" keeps 4 bits'
    return ""


def widens_experts(config: Config, model: ModelSpec) -> str:
    """Return why a model's experts cannot stay in the checkpoint's float8, '' if they can."""
    stored, experts = model.quantization, model.shape.experts
    if stored is None or stored.method != "fp8" or stored.block != FLOAT8_BLOCK:
        return "the checkpoint has no scale per block of 128 x 128"
    if runs_on_cpu(config.device.kind) or gpu_generation() != HOPPER:
        return "the kernel is for Hopper GPUs"
    if not experts or any(one.stacked or not one.gate or one.activation == "clamped_swish" for one in experts):
        return "the kernel is for experts with gates in tensors of their own"
    if "float16" in (config.model.dtype, model.dtype if config.model.dtype == "auto" else ""):
        return "the kernel computes in bfloat16, not in float16"
    ranks = config.device.tensor_parallel if config.model.experts == "cut" else 1
    if model.shape.hidden_size % FLOAT8_BLOCK[1] or any(one.expert_size % (ranks * FLOAT8_BLOCK[0]) for one in experts):
        return 'blocks would be cut; model.experts="divided" cuts none of whole experts'
    return ""


def _has_a_kernel(shape: ExpertsShape) -> bool:
    return shape.stacked and not shape.halved and shape.activation == "clamped_swish"
