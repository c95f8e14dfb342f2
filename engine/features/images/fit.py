"""Pictures and the model: whether and how it takes them, known before weights are loaded.

Owns: the reasons why a model reads text alone here, the check of a model that replaces another one.
Does not know: weights, prompts.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import DecoderShape
from engine.plugins.encoder.choice import chosen_encoder
from engine.plugins.encoder.encoder import Encoder
from engine.plugins.features import Facts, ModelFit
from engine.plugins.kinds import PROPOSER
from engine.text.pictures import FEWEST_TOKENS, NAME
from engine.types.errors import ConfigError

log = logging.getLogger(__name__)

MODELS_THAT_DRAFT: Final = (f"{PROPOSER}.draft_model", f"{PROPOSER}.eagle", f"{PROPOSER}.mtp")


def fit_model(fit: ModelFit) -> ModelFit:
    """Return the fit of a model that sees, if it does, with the settings of its encoder.

    Where this configuration reads no pictures the settings stay: ranks then refuse those that come."""
    encoder = chosen_encoder(fit.config, fit.spec.directory)
    if encoder is None:
        return fit
    fit = replace(fit, facts={**fit.facts, NAME: encoder.settings.encode()})
    if reason := refusal(fit.spec, encoder, fit.names, fit.config.kv.page_size):
        log.warning("pictures are refused: %s", reason)
        return fit
    use = msgspec.structs.replace(fit.spec.use, sees=True)
    return replace(fit, spec=msgspec.structs.replace(fit.spec, use=use))


def refusal(spec: ModelSpec, encoder: Encoder, names: Mapping[str, str], page_size: int) -> str:
    """Return why a model reads text alone here, for clients; '' if it reads pictures.

    names: as in ``ModelFit``.  page_size: tokens of a page."""
    shape, proposer = spec.shape, names.get(PROPOSER, "")
    if spec.use.kind != "generate":
        return f"this is {spec.use}, and takes text alone"
    if shape.built_by != DecoderShape.built_by and (encoder.axes or encoder.num_deep):
        return "this model is computed by transformers, and takes text alone here"
    if page_size < FEWEST_TOKENS:
        return f"kv.page_size={page_size}, and pages with pictures have at least {FEWEST_TOKENS} tokens"
    if encoder.num_deep >= shape.num_layers:
        return f"the encoder adds to {encoder.num_deep} layers, and the model has {shape.num_layers}"
    if proposer in MODELS_THAT_DRAFT:
        return f"plugins.proposer={proposer.partition('.')[2]!r} drafts for texts alone"
    if encoder.whole and any(one.soft_cap or one.latent_size or one.sinks or one.chunked for one in shape.attentions):
        return "the attention of this model's pictures is not computed here"
    return ""


def check_successor(old: Facts, new: Facts, path: str) -> None:
    """Raise ConfigError for a model that takes pictures in another way.  path: the model's path."""
    if old.get(NAME) != new.get(NAME):
        raise ConfigError(
            f"model.path={path}: it takes pictures in another way than the model that is served, and prompts are laid "
            "out for that one while the server runs; restart the server with this model"
        )
