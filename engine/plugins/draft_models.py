"""Whether a draft model can draft for the model: the same tokens, and text to generate.

Owns: that question, asked before any weights are loaded.  Does not know: torch, how it drafts.
"""

import logging
from pathlib import Path

import msgspec

from engine.checkpoints.checkpoint import ModelSpec, resolve_checkpoint
from engine.config import Config
from engine.errors import PluginError
from engine.plugins.families import read_model
from engine.scheduling.proposer import DraftModel
from engine.text.files import TokenizerFiles
from engine.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)


def fitting_draft(
    draft: DraftModel, plugin: str, config: Config, spec: ModelSpec, vocabulary: Vocabulary
) -> DraftModel:
    """The draft model with its path resolved and its longest sequence.  vocabulary: the model's; empty without a
    tokenizer.

    Raises PluginError, naming both models and the first token that differs, or WeightsError if it cannot be read."""
    directory = resolve_checkpoint(draft.path, "")
    own = read_model(directory, config.plugins)
    what = f"plugin {plugin}: {directory} cannot draft for {spec.directory}"
    if own.pooling.kind != "generate":
        raise PluginError(f"{what}: it is for {own.pooling}; name a model that generates text")
    if not len(vocabulary):
        if own.vocab_size != spec.vocab_size:
            sizes = f"it has {own.vocab_size} tokens, expected {spec.vocab_size}"
            raise PluginError(f"{what}: {sizes}; name a model with the same tokenizer")
    elif (difference := _difference(directory, vocabulary)) is not None:
        raise PluginError(f"{what}: {difference}; name a model with the same tokenizer")
    max_len = min(draft.max_len or own.max_len, own.max_len)
    log.info("draft model: %s, %s, up to %d tokens at a time", directory, own.architecture, draft.num_tokens)
    return msgspec.structs.replace(draft, path=str(directory), max_len=max_len)


def _difference(directory: Path, vocabulary: Vocabulary) -> str | None:
    """Of the draft model's tokenizer.  What one of them has beyond the other's last token makes none."""
    files = TokenizerFiles(directory)
    pieces = Vocabulary.read(files.tokenizer, files.decoder).all_pieces
    for token_id, (own, expected) in enumerate(zip(pieces, vocabulary.all_pieces, strict=False)):
        if own != expected:
            return f"its token {token_id} is {own!r}, expected {expected!r}"
    return None
