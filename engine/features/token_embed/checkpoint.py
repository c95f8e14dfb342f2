"""The way ``token_embed`` of a model that embeds.

Owns: which models have it, and the size of a token's vector.  Does not know: torch, endpoints.
"""

from dataclasses import replace
from typing import Final

import msgspec

from engine.checkpoints.feature import CheckpointFeature, Reading
from engine.checkpoints.use import OutputWay

NAME: Final = "token_embed"


class TokenEmbedCheckpoints(CheckpointFeature):
    """Adds the way to the use of models that embed."""

    def read(self, reading: Reading) -> Reading:
        """Return the reading with the way, if the model embeds whole prompts."""
        use = reading.use
        if "embed" not in use.tasks:
            return reading
        ways = use.ways | {NAME: OutputWay(whole=True, width=reading.shape.hidden_size)}
        return replace(reading, use=msgspec.structs.replace(use, ways=ways))


def checkpoint_feature() -> TokenEmbedCheckpoints:
    """Return the feature."""
    return TokenEmbedCheckpoints()
