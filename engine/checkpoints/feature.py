"""The hooks of optional parts that read more of a checkpoint than the family of its model does.

Owns: the hooks, and the state of a reading.  Does not know: which features there are (``engine/plugins/features.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape
from engine.checkpoints.use import ModelUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A checkpoint that is being read.

    fields: of config.json.  shape: the family's, or as a feature has changed it.  use: as far as it is known.
    score_tokens: ``model.score_tokens``.  token_id: returns a token's id."""

    directory: Path
    architecture: str
    fields: Fields
    shape: DecoderShape
    use: ModelUse
    score_tokens: tuple[str, ...]
    token_id: Callable[[str], int]


class CheckpointFeature:
    """An optional part of reading checkpoints.  A subclass overrides the hooks that it needs."""

    def decoders(self, architecture: str) -> tuple[str, ...]:
        """Return architectures with the decoder of this one and another head; () for none."""
        return ()

    def read(self, reading: Reading) -> Reading:
        """Return the reading with the feature's changes.  Raises WeightsError with the file and the expectation."""
        return reading
