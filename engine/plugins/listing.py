"""The list of ``callboard plugins``: every plugin, its origin, its needs, and whether it can run here.

Owns: the rows.  Does not know: their printing, torch.  No plugin is imported for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.config import Config
from engine.plugins.declaration import Declaration
from engine.plugins.hookspecs import AttentionContext, LinearContext
from engine.plugins.kinds import ATTENTION, KINDS, LINEAR, MODEL, REASONING_PARSER, TOOL_PARSER, chosen_plugins, named
from engine.plugins.linears import fitting_linears, linear_context
from engine.plugins.manager import PluginInfo, available_plugins, checked, decide, declared, several_names
from engine.plugins.model.settings import ModelFamilySettings
from engine.plugins.parsers import wanted_parsers
from engine.plugins.selection import BOTH, first_fit
from engine.settings.attention_names import AttentionNames
from engine.types.errors import PluginError


@dataclass(frozen=True, slots=True)
class Listed:
    """One plugin.  chosen: '', 'yes', or the phases it was chosen for.  needs: '' for nothing.
    hindrances: why it cannot run here; empty if its declaration fits."""

    info: PluginInfo
    chosen: str
    needs: str
    hindrances: tuple[str, ...]


def list_plugins(config: Config, context: AttentionContext, template: str | None = None) -> list[Listed]:
    """Return a row for every installed plugin.  context: this machine, the configuration and, if known, the model.

    template: the model's chat template, by which parsers are chosen; '' if it has none, None if it is not known.

    Raises PluginError if two distributions claim one name."""
    known = {info.name: info for info in available_plugins()}
    linear = linear_context(config, device=context.device, dtype=context.dtype)
    chosen = _chosen(config, known, context, linear) | _chosen_parsers(config, template)
    return [
        _row(info, chosen.get(info.name, ""), linear if info.kind == LINEAR else context) for info in known.values()
    ]


def _row(info: PluginInfo, chosen: str, context: AttentionContext | LinearContext) -> Listed:
    if info.kind not in KINDS:
        return Listed(info, chosen, "", (f"this callboard has no plugins of kind {info.kind!r}",))
    try:
        declaration = checked(info, declared(info))
    except PluginError as error:
        return Listed(info, chosen, "", (str(error),))
    return Listed(info, chosen, declaration.needs(), tuple(_hindrances(info, declaration, context)))


def _hindrances(info: PluginInfo, declaration: Declaration, context: AttentionContext | LinearContext) -> list[str]:
    if isinstance(context, LinearContext):
        return declaration.misfits(context)
    # A backend of one phase can run together with another one.
    phases = declaration.phases if info.kind == ATTENTION else ()
    return declaration.misfits(replace(context, phases=phases))


def _chosen(
    config: Config, known: Mapping[str, PluginInfo], context: AttentionContext, linear: LinearContext
) -> dict[str, str]:
    # A built-in family needs no choice: it serves every checkpoint of its architectures.
    chosen = {f"{MODEL}.{name}": "yes" for name in ModelFamilySettings.read(config.plugins).models}
    for kind, wanted in chosen_plugins(config).items():
        if isinstance(wanted, list):
            chosen |= dict.fromkeys(several_names(kind, wanted), "yes")
            continue
        if (kind, wanted) == (LINEAR, "auto"):
            # The start measures them and chooses one.
            chosen |= {info.name: "if fastest" for info in fitting_linears(known, linear)}
            continue
        if kind != ATTENTION and isinstance(wanted, str):
            chosen[f"{LINEAR}.{wanted}" if kind == LINEAR else decide(kind, wanted)] = "yes"
            continue
        both = wanted if isinstance(wanted, AttentionNames) else AttentionNames(prefill=wanted, decode=wanted)
        prefill, decode = both.prefill, both.decode
        phases = BOTH if prefill == decode else ()
        if prefill == "auto":
            prefill = _auto(known, replace(context, phases=phases or ("prefill",)))
        if decode == "auto":
            decode = _auto(known, replace(context, phases=phases or ("decode",)))
        chosen |= {f"{ATTENTION}.{prefill}": "prefill", f"{ATTENTION}.{decode}": "decode"}
        if prefill == decode:
            chosen[f"{ATTENTION}.{prefill}"] = "yes"
    return chosen


def _chosen_parsers(config: Config, template: str | None) -> dict[str, str]:
    parsers = zip((TOOL_PARSER, REASONING_PARSER), wanted_parsers(config.plugins, template or ""), strict=True)
    return {
        f"{kind}.{name}": "yes"
        for kind, (name, _) in parsers
        if name != "none" and (template is not None or named(config.plugins, kind) != "auto")
    }


def _auto(known: Mapping[str, PluginInfo], context: AttentionContext) -> str:
    fitting, _ = first_fit(known, context, {})
    return fitting.short if fitting is not None else ""
