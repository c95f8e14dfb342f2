"""Adapters and the model: which modules adapters may change, known before weights are loaded.

Owns: the check of a model, and of one that replaces it.  Does not know: weights, the adapters' files.
"""

from dataclasses import replace

import msgspec

from engine.features.lora.files import NAME, adapter_rules
from engine.features.lora.settings import LoraSettings
from engine.plugins.features import Facts, ModelFit
from engine.types.errors import ConfigError


def fit_model(fit: ModelFit) -> ModelFit:
    """Return the fit with the rules of adapters.  Raises ConfigError for a model that takes none."""
    settings = LoraSettings.of(fit.config)
    if not settings.folder:
        return fit
    rules = adapter_rules(fit.spec.shape, settings.folder, settings.max_rank, fit.config.model.numerics)
    return replace(fit, facts={**fit.facts, NAME: msgspec.msgpack.encode(rules)})


def check_successor(old: Facts, new: Facts, path: str) -> None:
    """Raise ConfigError for a model that the served adapters do not fit.  path: the model's path."""
    if old.get(NAME) != new.get(NAME):
        raise ConfigError(
            f"model.path={path}: its layers have other shapes than those that adapters are served for, and lora.folder "
            "stays as it is while the server runs; restart the server with this model"
        )
