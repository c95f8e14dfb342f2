"""The kind of the encoders of pictures."""

from typing import Final

from engine.plugins.kind import new_kind

ENCODER: Final = "encoder"
KIND: Final = new_kind(ENCODER, "encoder", "transformers", by_model=True)
