"""Pictures and the model: how it takes them, known before weights are loaded.

Owns: the check of a model that replaces another one.  Does not know: weights, prompts.
"""

from dataclasses import replace

from engine.plugins.encoder.choice import chosen_encoder
from engine.plugins.features import Facts, ModelFit
from engine.text.pictures import NAME
from engine.types.errors import ConfigError


def fit_model(fit: ModelFit) -> ModelFit:
    """Return the fit with the settings of the model's encoder, if it has one."""
    encoder = chosen_encoder(fit.config, fit.spec.directory)
    return fit if encoder is None else replace(fit, facts={**fit.facts, NAME: encoder.settings.encode()})


def check_successor(old: Facts, new: Facts, path: str) -> None:
    """Raise ConfigError for a model that takes pictures in another way.  path: the model's path."""
    if old.get(NAME) != new.get(NAME):
        raise ConfigError(
            f"model.path={path}: it takes pictures in another way than the model that is served, and prompts are laid "
            "out for that one while the server runs; restart the server with this model"
        )
