"""The section [images]."""

from typing import Annotated, Any, ClassVar

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
