"""The section [images], and the part of [placement] about encoders of pictures."""

from typing import Annotated, Any, ClassVar, Literal

from engine.settings.section import Addition, key


class ImageSettings(Addition, frozen=True):
    """[images]: pictures in conversations."""

    table: ClassVar[str] = "images"

    cache_tokens: Annotated[int, key(
        "Tokens of pictures that each rank keeps encoded, for prompts that are computed in parts or again; those "
        "of one request must be fewer", ge=1
    )] = 16384

    def recorded(self) -> dict[str, Any]:
        """Return the limit."""
        return {"cache_tokens": self.cache_tokens}


class EncoderPlacement(Addition, frozen=True):
    """The part of [placement] about encoders of pictures."""

    table: ClassVar[str] = "placement"

    encoder: Annotated[Literal["inline", "process"], key(
        "'inline': the encoder of pictures is a thread of each executor; 'process': a process beside it, restarted if "
        "it dies or hangs", changed="executors"
    )] = "inline"
