"""Checks whether a draft model or head fits the model: same tokens, text generation, available hidden states.

Owns: these checks, made before weights are loaded.  Does not know: torch, drafting.
"""

import logging
from pathlib import Path

import msgspec

from engine.checkpoints.checkpoint import ModelSpec, resolve_checkpoint
from engine.checkpoints.gguf import stored_tensors
from engine.checkpoints.shape import DecoderShape, PredictorShape
from engine.checkpoints.text_part import text_tensors
from engine.config import Config
from engine.features.speculation.head_files import EagleHeadShape, read_eagle_head
from engine.plugins.families import read_model
from engine.scheduling.proposer import DraftModel
from engine.text.files import TokenizerFiles
from engine.text.vocabulary import Vocabulary
from engine.types.errors import PluginError

log = logging.getLogger(__name__)


def fitting_model(
    draft: DraftModel, plugin: str, config: Config, spec: ModelSpec, max_len: int, vocabulary: Vocabulary
) -> DraftModel:
    """Return the draft model or head with its path resolved.  max_len, vocabulary: those of the model.

    Raises PluginError if it does not fit the model, WeightsError if it cannot be read."""
    if draft.is_part:
        return fitting_part(draft, plugin, config, spec, max_len)
    if draft.reads_states:
        return fitting_head(draft, plugin, spec, max_len)
    return fitting_draft(draft, plugin, config, spec, vocabulary)


def fitting_draft(
    draft: DraftModel, plugin: str, config: Config, spec: ModelSpec, vocabulary: Vocabulary
) -> DraftModel:
    """Return the draft model with its path and longest sequence filled in.

    vocabulary: the model's; empty without a tokenizer.
    Raises PluginError with both models and the first token that differs, or WeightsError if it cannot be read."""
    directory = resolve_checkpoint(draft.path, "")
    own = read_model(directory, config.plugins)
    what = f"plugin {plugin}: {directory} cannot draft for {spec.directory}"
    if own.state_bytes:
        raise PluginError(f"{what}: it has recurrent layers, whose states keep rejected tokens; name another model")
    if own.use.kind != "generate":
        raise PluginError(f"{what}: it is for {own.use}; name a model that generates text")
    if not len(vocabulary):
        if own.vocab_size != spec.vocab_size:
            sizes = f"it has {own.vocab_size} tokens, expected {spec.vocab_size}"
            raise PluginError(f"{what}: {sizes}; name a model with the same tokenizer")
    elif (difference := _difference(directory, vocabulary)) is not None:
        raise PluginError(f"{what}: {difference}; name a model with the same tokenizer")
    max_len = min(draft.max_len or own.max_len, own.max_len)
    log.info("draft model: %s, %s, up to %d tokens at a time", directory, own.architecture, draft.num_tokens)
    return msgspec.structs.replace(draft, path=str(directory), max_len=max_len)


def fitting_head(draft: DraftModel, plugin: str, spec: ModelSpec, max_len: int) -> DraftModel:
    """Return the head with its path resolved, and the model's longest sequence.

    Raises PluginError with the first mismatch, or WeightsError if it cannot be read."""
    directory = resolve_checkpoint(draft.path, "")
    own, model = read_eagle_head(directory).shape, spec.shape
    assert isinstance(own, EagleHeadShape)
    layers = own.state_layers_of(model.num_layers)
    if model.built_by != DecoderShape.built_by or spec.use.kind != "generate":
        reason = f"{spec.architecture} has another decoder than most families, or generates no text"
    elif own.vocab_size != model.vocab_size:
        reason = f"vocab_size is {own.vocab_size}, expected the model's {model.vocab_size}"
    elif own.hidden_size != model.hidden_size:
        reason = f"hidden_size is {own.hidden_size}, expected the model's {model.hidden_size}, whose embedding it reads"
    elif own.state_size != model.hidden_size:
        reason = f"target_hidden_size is {own.state_size}, expected the model's hidden_size {model.hidden_size}"
    elif list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < model.num_layers:
        reason = f"it reads the inputs of layers {list(layers)}, and the model has {model.num_layers} layers"
    else:
        log.info("EAGLE-3 head: %s, up to %d tokens at a time", directory, draft.num_tokens)
        return msgspec.structs.replace(draft, path=str(directory), max_len=max_len)
    raise PluginError(f"plugin {plugin}: {directory} cannot draft for {spec.directory}: {reason}")


def fitting_part(draft: DraftModel, plugin: str, config: Config, spec: ModelSpec, max_len: int) -> DraftModel:
    """Return the model's own layer for drafts, with the path of its checkpoint and the model's longest sequence.

    Raises PluginError if the model has none, WeightsError if its files cannot be read."""
    own, other = spec.shape.predictor, "name another proposer"
    if spec.shape.built_by != DecoderShape.built_by or spec.use.kind != "generate":
        reason = f"{spec.architecture} has another decoder than most families, or generates no text; {other}"
    elif own is None:
        reason = f"no layer of {spec.architecture} predicts one token further; {other}"
    elif config.model.load_format == "safetensors" and not stores(spec, own):
        reason = f"its files have no tensors {own.stem}.*, which programs that write one may leave out; {other}"
    else:
        log.info("multi-token prediction: %s of the model, up to %d tokens at a time", own.stem, draft.num_tokens)
        return msgspec.structs.replace(draft, path=str(spec.directory), max_len=max_len)
    raise PluginError(f"plugin {plugin}: {spec.directory} cannot draft for itself: {reason}")


def stores(spec: ModelSpec, own: PredictorShape) -> bool:
    """Return whether a checkpoint has the layer of its model."""
    stored = text_tensors(spec.config["architectures"][0], stored_tensors(spec.directory))
    return any(name.startswith(f"{own.stem}.") for name in stored)


def _difference(directory: Path, vocabulary: Vocabulary) -> str | None:
    """Return the first difference of the two tokenizers.  Tokens beyond the other's last one are no difference."""
    files = TokenizerFiles(directory)
    pieces = Vocabulary.read(files.tokenizer, files.decoder).all_pieces
    for token_id, (own, expected) in enumerate(zip(pieces, vocabulary.all_pieces, strict=False)):
        if own != expected:
            return f"its token {token_id} is {own!r}, expected {expected!r}"
    return None
