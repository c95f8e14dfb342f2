"""The layer of a model's own checkpoint that predicts one token further, as a head that drafts.

Owns: its shape.  Does not know: torch, which family has such a layer.
"""

import re
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import PredictorShape
from engine.features.speculation.head_files import HeadShape
from engine.plugins.families import read_model
from engine.settings.sections import ModelSection, PluginsSection


class MTPHeadShape(HeadShape, frozen=True, kw_only=True):
    """The shape of such a layer.  The other fields are those of the model's shape, but for ``layers`` and ``norm``."""

    built_by: ClassVar[str] = "engine.features.speculation.mtp_model:MTPHead"
    own: PredictorShape


def read_mtp_head(directory: Path, plugins: PluginsSection, model: ModelSection) -> ModelSpec:
    """Return the description of a model's checkpoint with the layer in the place of the model, which has one."""
    spec = read_model(directory, plugins, model)
    shape, own = spec.shape, spec.shape.predictor
    assert own is not None, f"{spec.architecture} has no layer that predicts one token further"
    head = MTPHeadShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        max_len=shape.max_len,
        layers=(own.layer,),
        norm=own.norm,
        embedding_scale=shape.embedding_scale,
        unread=(rf"^(?!{re.escape(own.stem)}\.)", *own.unread),
        names=replace(shape.names, layers=own.prefix.rpartition(".")[0]),
        own=own,
    )
    return replace(spec, shape=head)
