"""Which linear kernels can serve: by what they declare, before any of them is imported.

Owns: the order of preference, the wording of a refusal.  Does not know: torch, kernels, which of several is fastest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.config import Config
from engine.plugins.hookspecs import LinearContext
from engine.plugins.kinds import LINEAR
from engine.plugins.manager import PluginInfo, Plugins, checked, declared
from engine.types.errors import PluginError

# The first that fits serves, unless another one is measured to be clearly faster.
PREFERRED = (
    "panels",
    "onednn",
    "fbgemm_fp16",
    "fbgemm_int8",
    "torch",
    "triton_int8",
    "torch_fp8",
    "torch_fp8_block",
    "torch_int4",
)
# Behind these where the context asks for invariant results: what is slower, and has no other use.
INVARIANT = ("triton",)


def linear_context(
    config: Config,
    checkpoint_dtype: str = "",
    *,
    device: str = "",
    dtype: str = "",
    instruction_sets: tuple[str, ...] | None = None,
    scale_block: tuple[int, int] | None = None,
) -> LinearContext:
    """The context of a configuration.  '' and None stand for what is not known before anything is loaded."""
    kind, wanted = config.device.kind, config.model.dtype
    return LinearContext(
        device=device or (kind if kind != "auto" else ""),
        dtype=dtype or (wanted if wanted != "auto" else ""),
        quantization=config.model.quantization,
        checkpoint_dtype=checkpoint_dtype,
        instruction_sets=instruction_sets,
        scale_block=scale_block,
        traced=config.graphs.mode == "compiled",
        invariant=config.model.numerics == "invariant",
    )


def check_linear_fits(plugins: Plugins, context: LinearContext) -> None:
    """Refuse, before any weight is loaded, a named kernel that cannot run, and a quantization that nobody offers."""
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
    """The built-in kernels that 'auto' chooses from, the preferred one first.  It imports no plugin."""
    names = (*PREFERRED, *INVARIANT) if context.invariant else PREFERRED
    infos = [known[f"{LINEAR}.{name}"] for name in names]
    return [info for info in infos if not checked(info, declared(info)).misfits(context)]


def keeping(known: Mapping[str, PluginInfo], names: Iterable[str], context: LinearContext) -> list[str]:
    """Of built-in kernels by their short names, those that keep the elements that the checkpoint stores in float8."""
    declarations = {name: declared(known[f"{LINEAR}.{name}"]) for name in names}
    return [name for name, one in declarations.items() if one is not None and one.keeps_elements(context)]


def linear_refusal(known: Mapping[str, PluginInfo], context: LinearContext) -> str:
    """The error where no built-in kernel fits: what could be asked for instead, by the plugins' declarations."""
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
        f"model.quantization={context.quantization!r}: no built-in kernel {where} keeps weights so; these do here: "
        f"{choices}, or name a plugin that does in plugins.linear"
    )
