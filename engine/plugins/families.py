"""The choice of the model family for a checkpoint: a named plugin for its architecture, a built-in one, transformers.

Owns: that choice, and the error if there is none.  Does not know: torch, the content of checkpoints.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from engine.checkpoints.checkpoint import ModelSpec, read_spec
from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape, ExpertsShape
from engine.checkpoints.through_transformers import ThroughTransformers
from engine.plugins.declaration import Declaration
from engine.plugins.features import checkpoint_features
from engine.plugins.hookspecs import ModelContext
from engine.plugins.kinds import MODEL
from engine.plugins.manager import PluginInfo, Plugins, checked, declared
from engine.plugins.model.settings import ModelFamilySettings
from engine.settings.sections import ModelSection, PluginsSection
from engine.text.files import token_id
from engine.text.settings import ScoreSettings
from engine.types.errors import ConfigError, PluginError

THROUGH = "model.transformers"  # declares no architecture: it reads what no other family does


@dataclass(frozen=True, slots=True)
class ListedFamily:
    """An architecture that an installed plugin reads.  serves: whether it is used, because it is built in or named."""

    architecture: str
    info: PluginInfo
    serves: bool


def read_model(directory: Path, section: PluginsSection | None = None, model: ModelSection | None = None) -> ModelSpec:
    """Read the description of a checkpoint's model.

    section: the families to try before the built-in ones.  model: settings of its tokenizer, its use and its length.
    Raises WeightsError with the file, field and expectation; PluginError for a plugin that fails; ConfigError for
    divided experts in a model without experts."""
    model = model or ModelSection()
    tokens = ScoreSettings.read(model).score_tokens
    shapes = partial(read_shape, section or PluginsSection())
    id_of = partial(token_id, Path(model.tokenizer or directory))
    spec = read_spec(directory, shapes, tokens, id_of, checkpoint_features())
    spec = replace(spec, shape=spec.shape.for_length(model.max_model_len))
    if model.experts != "cut":
        spec = replace(spec, shape=_with_divided_experts(spec, model.experts))
    return spec


def read_shape(section: PluginsSection, architecture: str, fields: Fields) -> DecoderShape:
    """Return the shape of a checkpoint.  Raises WeightsError with the known architectures otherwise."""
    plugins = Plugins({}, section.options)
    info, model_types, declared_name = _family(plugins, section, architecture, fields)
    # transformers reads one field or the other, depending on the call, so both must agree.
    allowed = model_types.split(" | ")
    if model_types and (seen := fields.text("model_type", allowed[0])) not in allowed:
        expected = " or ".join(f'"{one}"' for one in allowed)
        raise fields.error("model_type", seen, f"{expected}, since architectures names {architecture}")
    plugins.load(info.name)
    return plugins.build(info.name, ModelContext(declared_name, fields), DecoderShape)


def _with_divided_experts(spec: ModelSpec, how: str) -> DecoderShape:
    """Return the shape of a model whose ranks hold whole experts.  how: as in ``model.experts``."""
    if not spec.shape.experts:
        through = " through transformers" if isinstance(spec.shape, ThroughTransformers) else ""
        what = f"{spec.architecture}{through} has no experts that ranks could divide"
        raise ConfigError(f'model.experts="{how}": {what}; set it to "cut"')
    exchanged = how == "exchanged"
    if exchanged and any(isinstance(one.mlp, ExpertsShape) and one.mlp.shared_size for one in spec.shape.layers):
        raise ConfigError(
            f'model.experts="exchanged": every rank has a result of the shared expert of {spec.architecture} for every '
            'token, so a sum sends less; set it to "divided" or "cut"'
        )
    return spec.shape.with_experts(divided=True, exchanged=exchanged)


def list_families(section: PluginsSection) -> list[ListedFamily]:
    """Return every architecture that an installed plugin declares, sorted; no plugin is imported."""
    known = Plugins({}).known.values()
    named = {f"{MODEL}.{name}" for name in ModelFamilySettings.read(section).models}
    listed = [
        ListedFamily(architecture, info, info.built_in or info.name in named)
        for info in known
        for architecture in _declares(info)
    ]
    return sorted(listed, key=lambda one: (one.architecture, one.info.name))


def _family(
    plugins: Plugins, section: PluginsSection, architecture: str, fields: Fields
) -> tuple[PluginInfo, str, str]:
    """Return the plugin, the model_types of the architecture ('' for any), and the plugin's name of the architecture.

    A family also reads its decoder under another head, or none, if no plugin declares that architecture itself."""
    claimed = {}
    for name in ModelFamilySettings.read(section).models:
        info = plugins.load(f"{MODEL}.{name}")
        claimed[info] = plugins.declarations[info.name].architectures
    built_in = {info: declaration.architectures for info, declaration in _built_in(plugins.known.values())}
    through = plugins.known[THROUGH]
    others = [name for feature in checkpoint_features() for name in feature.decoders(architecture)]
    for name in (architecture, *others):
        claims = [(info, known[name], name) for info, known in claimed.items() if name in known]
        if len(claims) > 1:
            names = " and ".join(info.short for info, *_ in claims)
            raise PluginError(f"plugins.models: {names} both read {name}; name one of them")
        if through in claimed and not others:
            claims.append((through, "", name))
        claims += [(info, known[name], name) for info, known in built_in.items() if name in known]
        if claims:
            return claims[0]
    installed = [info.short for info in plugins.known.values() if architecture in _declares(info)]
    if installed:
        advice = f"; the installed plugin {' or '.join(installed)} reads it: name it in plugins.models"
    elif others:
        advice = ""
    elif checked(through, declared(through)).missing_packages():
        advice = "; with transformers (pip install 'callboard[transformers]') most other decoders are served through it"
    else:
        return through, "", architecture
    every = sorted({name for known in (*claimed.values(), *built_in.values()) for name in known})
    raise fields.error("architectures", architecture, f"one of {', '.join(every)}{advice}")


def _built_in(known: Iterable[PluginInfo]) -> Iterator[tuple[PluginInfo, Declaration]]:
    for info in known:
        if info.built_in and info.kind == MODEL:
            yield info, checked(info, declared(info))


def _declares(info: PluginInfo) -> dict[str, str]:
    """Return the architectures that a plugin declares, without importing it; {} for an invalid declaration."""
    try:
        declaration = declared(info) if info.kind == MODEL else None
    except PluginError:
        return {}
    return {} if declaration is None else declaration.architectures
