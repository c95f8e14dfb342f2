"""The linear kernels that can run: chosen by their declarations, before any is imported.

Owns: the order of preference, the wording of a refusal.  Does not know: torch, kernels, which kernel is fastest.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.quantization import MXFP4, MXFP4_GROUP
from engine.checkpoints.shape import ExpertsShape
from engine.config import Config
from engine.host.device_defaults import gpu_generation, multiplies_float8_blocks, runs_on_cpu
from engine.plugins.families import with_four_bits
from engine.plugins.hookspecs import LinearContext
from engine.plugins.kinds import LINEAR, chosen_plugins
from engine.plugins.manager import PluginInfo, Plugins, checked, declared
from engine.types.errors import ConfigError, PluginError

log = logging.getLogger(__name__)

HOPPER = 9  # the generation of GPUs that multiplies float8 with every kind of scales
# Of hidden states: products of smaller models take longer in float8 than in bfloat16 (docs/performance.md).
FLOAT8_WIDTH = 2048
# The first that fits is used, unless another one is measured to be clearly faster.
PREFERRED = (
    "panels",
    "blocks",
    "onednn",
    "fbgemm_fp16",
    "fbgemm_int8",
    "triton_rows",
    "torch",
    "triton_int8",
    "torch_fp8",
    "torch_fp8_block",
    "torch_int4",
)
# Tried after these if the context requires invariant results: slower kernels without another use.
INVARIANT = ("triton",)


def linear_context(
    config: Config,
    checkpoint_dtype: str = "",
    *,
    device: str = "",
    dtype: str = "",
    instruction_sets: tuple[str, ...] | None = None,
    scale_block: tuple[int, int] | None = None,
    stored_formats: tuple[str, ...] = (),
) -> LinearContext:
    """Return the context of a configuration; '' and None stand for values not known before loading."""
    kind, wanted = config.device.kind, config.model.dtype
    return LinearContext(
        device=device or (kind if kind != "auto" else ""),
        dtype=dtype or (wanted if wanted != "auto" else ""),
        quantization="none" if config.model.quantization in ("auto", MXFP4) else config.model.quantization,
        checkpoint_dtype=checkpoint_dtype,
        instruction_sets=instruction_sets,
        scale_block=scale_block,
        stored_formats=stored_formats,
        traced=config.graphs.mode == "compiled",
        invariant=config.model.numerics == "invariant",
    )


def check_linear_fits(plugins: Plugins, context: LinearContext) -> None:
    """Raise PluginError before weights are loaded, if the named kernel cannot run or no kernel quantizes so."""
    named = plugins.names.get(LINEAR)
    if named is None:
        if not fitting_linears(plugins.known, context):
            raise PluginError(linear_refusal(plugins.known, context))
        return
    info = plugins.find(named)
    if misfits := plugins.declarations[named].misfits(context):
        others = [one.short for one in fitting_linears(plugins.known, context)]
        can = f"; can run here: {', '.join(others)}" if others else "; no built-in one can run here"
        raise PluginError(f"plugin {info.label} cannot run here: {'; '.join(misfits)}{can}")


def fitting_linears(known: Mapping[str, PluginInfo], context: LinearContext) -> list[PluginInfo]:
    """Return the built-in kernels for 'auto', the preferred one first.  No plugin is imported."""
    names = (*PREFERRED, *INVARIANT) if context.invariant else PREFERRED
    infos = [known[f"{LINEAR}.{name}"] for name in names]
    return [info for info in infos if not checked(info, declared(info)).misfits(context)]


def with_weight_type(config: Config, model: ModelSpec) -> tuple[Config, ModelSpec]:
    """Return the configuration with 'auto' replaced in ``model.quantization``, and the model as it is then.

    Raises ConfigError for weights in 4 bits on a device that does not multiply by them."""
    stored, kept = model.quantization, "none"
    if config.model.quantization == MXFP4:
        if why_not := _needs_floats(config, model):
            raise ConfigError(f'model.quantization="{MXFP4}": {why_not}; set it to "auto"')
        return config, with_four_bits(model)
    if config.model.quantization != "auto":
        return config, model
    if stored is not None and stored.method == MXFP4:
        why_not = _needs_floats(config, model)
        kept, model = ("none", model) if why_not else (MXFP4, with_four_bits(model))
        log.info(
            "auto: model.quantization=%s (%s)", kept, why_not or "a kernel multiplies by experts as they are stored"
        )
    elif stored is not None and stored.is_float8 and not runs_on_cpu(config.device.kind) and gpu_generation() == HOPPER:
        dtype = config.model.dtype if config.model.dtype != "auto" else model.dtype
        context = linear_context(config, device="cuda", scale_block=stored.block)
        # 'auto' widens a checkpoint of float32 to bfloat16 on a GPU.
        context = replace(context, dtype="bfloat16" if dtype == "float32" else dtype)
        small = model.shape.hidden_size < FLOAT8_WIDTH
        if not small and (stored.block[0] <= 1 or multiplies_float8_blocks()):
            kept = kept_type(Plugins(chosen_plugins(config)), context)
        log.info("auto: model.quantization=%s (%s with %s%s)", kept, stored, stored.scales, ", small" if small else "")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, quantization=kept)), model


def _needs_floats(config: Config, model: ModelSpec) -> str:
    """Return why experts that are stored in 4 bits must become floats on a GPU, '' if they need not."""
    if runs_on_cpu(config.device.kind):
        return "on a CPU experts become floats as they are laid out"
    dtype, ranks = config.model.dtype, config.device.tensor_parallel
    if dtype == "auto":
        dtype = "float16" if model.dtype == "float16" else "bfloat16"
    if dtype != "bfloat16":
        return f"the kernel computes in bfloat16, not in {dtype}"
    sizes = {one.mlp.expert_size for one in model.shape.layers if isinstance(one.mlp, ExpertsShape)}
    if config.model.experts == "cut" and any(size % (MXFP4_GROUP * ranks) for size in sizes):
        return f'{ranks} ranks would cut groups of inputs that share a scale; model.experts="divided" keeps 4 bits'
    return ""


def kept_type(plugins: Plugins, context: LinearContext) -> str:
    """Return what ``model.quantization = "auto"`` stands for: 'fp8' if a built-in kernel multiplies by the checkpoint's
    elements in float8 as they are, else 'none'."""
    wanted = replace(context, quantization="fp8")
    if wanted.scale_block is None or plugins.names.get(LINEAR) is not None:
        return "none"
    fitting = [info.short for info in fitting_linears(plugins.known, wanted)]
    return "fp8" if keeping(plugins.known, fitting, wanted) else "none"


def keeping(known: Mapping[str, PluginInfo], names: Iterable[str], context: LinearContext) -> list[str]:
    """Return the built-in kernels among ``names`` that keep the elements of the checkpoint."""
    declarations = {name: declared(known[f"{LINEAR}.{name}"]) for name in names}
    return [name for name, one in declarations.items() if one is not None and one.keeps_elements(context)]


def linear_refusal(known: Mapping[str, PluginInfo], context: LinearContext) -> str:
    """Return the error if no built-in kernel fits; it lists the quantizations that the plugins declare."""
    offered: set[str] = set()
    for info in known.values():
        if info.kind != LINEAR:
            continue
        declaration = checked(info, declared(info))
        offered |= {
            one for one in declaration.quantizations if not declaration.misfits(replace(context, quantization=one))
        }
    choices = ", ".join(map(repr, sorted(offered)))
    where = f"on {context.device or 'any device'} for {context.dtype or 'any dtype'}"
    where += " with model.numerics=invariant" if context.invariant else ""
    return (
        f"model.quantization={context.quantization!r}: no built-in kernel {where} supports it; supported here: "
        f"{choices}, or name a plugin that supports it in plugins.linear"
    )
