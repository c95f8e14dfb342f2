"""Adapters as a part of the server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.config import Config
from engine.features.lora.files import NAME, AdapterRules, adapter_rules
from engine.features.lora.settings import LoraSettings
from engine.plugins.families import read_model
from engine.types.errors import CallboardError, ConfigError
from server.extensions.adapters.adapters import Adapters, adapters_below
from server.extensions.adapters.metrics import AdapterSamples
from server.extensions.adapters.routes import AdapterRoutes
from server.run.extension import Extension, ServerParts
from server.run.finding import Finding
from server.variant import ServedVariant

if TYPE_CHECKING:
    from engine.control.system import System

PART = "adapters"  # of the model's card and of what is kept


class Described(msgspec.Struct, frozen=True):
    """The part of the model's card: which adapters it takes, and those that are served at start, by their names."""

    rules: AdapterRules
    served: dict[str, ServedVariant]


class AdaptersExtension(Extension):
    """Adapters, where lora.folder names their folder."""

    handlers = (AdapterRoutes,)

    def check(self, config: Config, engines: str = "") -> None:
        if (folder := LoraSettings.of(config).folder) and config.array:
            raise ConfigError(f"lora.folder={folder}: adapters are of one model, and this file has [[{config.array}]]")

    def findings(self, config: Config) -> Iterator[Finding]:
        settings = LoraSettings.of(config)
        if not settings.folder:
            return
        try:
            directory = resolve_checkpoint(config.model.path, config.model.revision)
            spec = read_model(directory, config.plugins, config.model)
        except CallboardError:
            return  # the check of the model names the error
        try:
            rules = adapter_rules(spec.shape, settings.folder, settings.max_rank, config.model.numerics)
        except ConfigError as error:
            yield Finding("adapters", "bad", "a start refuses them", str(error))
        else:
            yield Finding("adapters", "good", f"served from {rules.folder}")

    def describe(self, system: "System") -> dict[str, bytes]:
        if (facts := system.engine.facts.get(NAME)) is None:
            return {}
        rules = msgspec.msgpack.decode(facts, type=AdapterRules)
        return {PART: msgspec.msgpack.encode(Described(rules, adapters_below(rules, system.model_name)))}

    def join(self, parts: ServerParts) -> None:
        card, kept, rules = parts.backend.card, parts.kept, None
        served = parts.translator.variants
        if (about := card.parts.get(PART)) is not None:
            described = msgspec.msgpack.decode(about, type=Described)
            rules = described.rules
            state = kept.get(PART)
            served.update(
                described.served if state is None else msgspec.msgpack.decode(state, type=dict[str, ServedVariant])
            )
        adapters = Adapters(rules, served, card.name, lambda: kept.put(PART, msgspec.msgpack.encode(served)))
        parts.routes.add(AdapterRoutes(adapters, parts.server))
        parts.collectors.append(AdapterSamples(card.name, served).collect)


EXTENSION = AdaptersExtension()
