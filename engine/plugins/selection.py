"""The choice of attention backends: the named ones, or for 'auto' the measured fastest, or else the first that can run
here; and the reasons.

Owns: the order of preference on each kind of device, the texts of refusals.  Does not know: torch, kernels, the
measurement of backends.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.checkpoints.shape import DecoderShape
from engine.config import Config
from engine.host.timeouts import named_while_slow
from engine.plugins.declaration import Declaration, Phase
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.kinds import ATTENTION, KINDS
from engine.plugins.manager import PluginInfo, Plugins, checked, declared
from engine.types.errors import PluginError

if TYPE_CHECKING:
    from engine.layers.attention import AttentionFactory

log = logging.getLogger(__name__)

HOOK = KINDS[ATTENTION].hook
BOTH: tuple[Phase, ...] = ("prefill", "decode")
# Fastest first; a name that is not in this callboard, or cannot run here, is skipped.
PREFERRED: Mapping[str, tuple[str, ...]] = {
    "cuda": ("flashinfer", "flash_mla", "flash_attn", "triton", "xqa", "torch"),
    "cpu": ("torch",),
}
# The same for contexts that require invariant results.
INVARIANT = ("tiles", "triton")


@dataclass(frozen=True, slots=True)
class Contender:
    """A backend, by its short name, and its options besides those of the configuration."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


Measured = Mapping[str, Contender]  # phase -> the fastest contender
NOT_MEASURED: Measured = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend that can run here.  factory: builds it.  phases: those that it serves.
    auto: whether another may replace it.  reason: for the log.  options: those of the measurement."""

    info: PluginInfo
    declaration: Declaration
    factory: "AttentionFactory"
    phases: tuple[str, ...]
    auto: bool
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


def choose_attention(
    plugins: Plugins,
    context: AttentionContext,
    refused: Mapping[str, str] | None = None,
    measured: Measured = NOT_MEASURED,
) -> tuple[AttentionChoice, ...]:
    """Choose one backend for both phases, or two: one for prefill and one for decode.

    context: this rank's; each plugin gets it with its own options and phases.
    refused: short name -> reason, for backends that 'auto' chose and that could not be built.
    measured: the choice of 'auto' for a phase, unless that backend refuses.
    Raises PluginError, which names the plugin and the alternatives.
    """
    with plugins.choosing:
        choices = _choose_phases(plugins, context, refused or {}, measured)
    for choice in choices:
        log.info("plugin: %s for %s (%s)", choice.info.name, " and ".join(choice.phases), choice.reason)
    return tuple(choices)


def _choose_phases(
    plugins: Plugins, context: AttentionContext, refused: Mapping[str, str], measured: Measured
) -> list[AttentionChoice]:
    wanted = {"prefill": plugins.attention.prefill, "decode": plugins.attention.decode}
    names = set(wanted.values())
    if len(names) == 1 and not (measured and "auto" in names):
        return [_choose(plugins, wanted["prefill"], replace(context, phases=BOTH), refused, None)]
    choices = [
        _choose(plugins, name, replace(context, phases=(phase,)), refused, measured.get(phase))
        for phase, name in wanted.items()
    ]
    first, second = choices
    if first.info == second.info and all(
        first.options.get(key, value) == value for key, value in second.options.items()
    ):
        both = Contender(first.info.short, {**first.options, **second.options})
        asked = ask(plugins, both, replace(context, phases=BOTH), first.reason)
        choices = [replace(asked, auto=first.auto and second.auto)]
    return choices


def contenders(plugins: Plugins, context: AttentionContext) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders for the context's phases, preferred ones first, and name -> reason for the excluded ones.

    They include the backends that the configuration names.  No plugin is imported."""
    found: list[Contender] = []
    passed_over: dict[str, str] = {}
    named = {plugins.attention.prefill, plugins.attention.decode} - {"auto"}
    preferred = _preferred(context)
    for name in (*preferred, *sorted(named.difference(preferred))):
        info = plugins.known.get(f"{ATTENTION}.{name}")
        if info is None or not (info.built_in or name in named):
            continue
        try:
            declaration = checked(info, declared(info))
        except PluginError as error:
            passed_over[name] = str(error)
            continue
        if reasons := declaration.misfits(context) or ([] if name in named else _losses(declaration, context)):
            passed_over[name] = "; ".join(reasons)
            continue
        set_by_user = plugins.options.get(info.name, {})
        found.append(Contender(name))
        found += [
            Contender(name, variant.options)
            for variant in declaration.variants
            if variant.phase in context.phases and not variant.options.keys() & set_by_user.keys()
        ]
    return found, passed_over


def attention_factory(name: str, context: AttentionContext) -> "AttentionFactory":
    """Return the factory of one backend by its short name, for a plugin that wraps it.  Raises PluginError."""
    (choice,) = choose_attention(Plugins({ATTENTION: name}), context)
    return choice.factory


def expected_context(
    config: Config, shape: DecoderShape | None, *, device: str = "", dtype: str = ""
) -> AttentionContext:
    """Return the context as far as it is known before anything is loaded; '' and 0 stand for the rest.

    shape: None for a model that is not on this machine.  device, dtype: the resolved 'auto', if known."""
    kind, wanted_dtype = config.device.kind, config.model.dtype
    dtype = dtype or (wanted_dtype if wanted_dtype != "auto" else "")
    return AttentionContext(
        device=device or (kind if kind != "auto" else ""),
        dtype=dtype,
        page_size=config.kv.page_size,
        num_heads=shape.num_heads if shape else 0,
        num_kv_heads=shape.num_kv_heads if shape else 0,
        head_size=shape.head_size if shape else 0,
        window=shape.window if shape else 0,
        kv_layout=config.kv.layout,
        kv_dtype=config.kv.kept_as(dtype),
        needs=shape.attention_needs if shape else (),
        invariant=config.model.numerics == "invariant",
    )


def check_named(plugins: Plugins, context: AttentionContext) -> None:
    """Refuse a named backend that cannot run, before any weight is loaded.

    context: 0 and '' stand for unknown values.  Raises PluginError, which names the plugin and the alternatives.
    """
    wanted = plugins.attention
    phases: dict[str, tuple[str, ...]] = {wanted.prefill: ("prefill",), wanted.decode: ("decode",)}
    if len(phases) == 1:
        phases[wanted.prefill] = BOTH
    for name, served in phases.items():
        if name == "auto":
            continue
        info, told = plugins.find(f"{ATTENTION}.{name}"), replace(context, phases=served)
        try:
            _check_fit(info, plugins.declarations[info.name], told)
        except PluginError as error:
            raise PluginError(f"{error}{alternatives(plugins.known, told, besides=info.name)}") from None


def first_fit(
    known: Mapping[str, PluginInfo], context: AttentionContext, refused: Mapping[str, str]
) -> tuple[PluginInfo | None, list[str]]:
    """Return the backend that 'auto' chooses by the plugins' declarations, and why it skips the ones before.

    No plugin is imported.  refused: short name -> reason, for backends whose hook has refused."""
    passed_over: list[str] = []
    for name in _preferred(context):
        info = known.get(f"{ATTENTION}.{name}")
        if info is None or not info.built_in:  # plugins of others are imported only if the configuration names them
            continue
        reasons = [refused[name]] if name in refused else _misfits(info, context)
        if not reasons:
            return info, passed_over
        passed_over.append(f"{name}: {'; '.join(reasons)}")
    return None, passed_over


def alternatives(known: Mapping[str, PluginInfo], context: AttentionContext, besides: str) -> str:
    """Return the end of an error message: the other backends that can run here by their declarations."""
    others = [info for info in known.values() if info.kind == ATTENTION and info.name != besides]
    fitting = [info.short for info in others if not _misfits(info, context)]
    return f"; can run here: {', '.join(fitting)}" if fitting else "; no other backend can run here"


def _choose(
    plugins: Plugins, wanted: str, context: AttentionContext, refused: Mapping[str, str], measured: Contender | None
) -> AttentionChoice:
    if wanted != "auto":
        info = plugins.find(f"{ATTENTION}.{wanted}")
        try:
            return ask(plugins, Contender(wanted), context, "chosen by name")
        except PluginError as error:
            raise PluginError(f"{error}{alternatives(plugins.known, context, besides=info.name)}") from error
    said_no = dict(refused)
    if measured is not None and measured.name not in said_no:
        try:
            return replace(ask(plugins, measured, context, f"auto: {measured} was measured the fastest"), auto=True)
        except PluginError as error:
            said_no[measured.name] = str(error)
    while True:
        fitting, passed_over = first_fit(plugins.known, context, said_no)
        if fitting is None:
            where = context.device + (" with model.numerics=invariant" if context.invariant else "")
            raise PluginError(f"no attention backend can run on {where}: {' / '.join(passed_over)}")
        try:
            reason = " / ".join([f"auto on {context.device}", *passed_over])
            return replace(ask(plugins, Contender(fitting.short), context, reason), auto=True)
        except PluginError as error:
            said_no[fitting.short] = str(error)


def ask(plugins: Plugins, contender: Contender, context: AttentionContext, reason: str) -> AttentionChoice:
    """Call a plugin's hook for its factory, if its declaration fits.  Raises PluginError."""
    info = plugins.load(f"{ATTENTION}.{contender.name}")
    declaration = plugins.declarations[info.name]
    _check_fit(info, declaration, context)
    context = replace(context, options={**contender.options, **plugins.options.get(info.name, {})})
    try:
        with named_while_slow(f"plugin {info.label}: {HOOK}"):
            factory: AttentionFactory | None = plugins.asking(info.name)(context=context)
    except PluginError as error:
        raise PluginError(f"plugin {info.label}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin {info.label} raised {error!r} in {HOOK}") from error
    if factory is None or not callable(factory):
        raise PluginError(
            f"plugin {info.label} built no attention backend: it must implement {HOOK} and return a callable "
            f"(spec, pool), not {factory!r}"
        )
    return AttentionChoice(info, declaration, factory, context.phases, False, reason, contender.options)


def _preferred(context: AttentionContext) -> tuple[str, ...]:
    return INVARIANT if context.invariant else PREFERRED.get(context.device, PREFERRED["cpu"])


def _check_fit(info: PluginInfo, declaration: Declaration, context: AttentionContext) -> None:
    if misfits := declaration.misfits(context):
        raise PluginError(f"plugin {info.label} cannot run here: {'; '.join(misfits)}")


def _misfits(info: PluginInfo, context: AttentionContext) -> list[str]:
    try:
        declaration = checked(info, declared(info))
        return declaration.misfits(context) + _losses(declaration, context)
    except PluginError as error:
        return [str(error)]


def _losses(declaration: Declaration, context: AttentionContext) -> list[str]:
    """Return losses of precision beyond the type of pages that was configured; only a named backend may have them."""
    rounds = context.kv_dtype in declaration.rounded_queries
    return [f"it would round queries to {context.kv_dtype} as well; name it to have that"] if rounds else []
