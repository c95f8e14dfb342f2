"""The linear kernels that can run: chosen by their declarations, before any is imported.

Owns: the order of preference, the wording of a refusal.  Does not know: torch, kernels, which kernel is fastest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.checkpoints.quantization import MXFP4
from engine.config import Config
from engine.plugins.hookspecs import LinearContext
from engine.plugins.kinds import LINEAR
from engine.plugins.manager import PluginInfo, Plugins, checked, declared
from engine.types.errors import PluginError

# The first that fits is used, unless another one is measured to be clearly faster.
PREFERRED = (
    "panels",
    "blocks",
    "onednn",
    "fbgemm_fp16",
    "fbgemm_int8",
    "triton_blocks",
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
