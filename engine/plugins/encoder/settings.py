"""The part of the section [plugins] about encoders of pictures."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class EncoderChoice(Addition, frozen=True):
    """The part of [plugins] about encoders of pictures."""

    table: ClassVar[str] = "plugins"

    encoder: Annotated[str, key(
        "Encoder of pictures: transformers; 'auto' takes the one that knows the model, if its packages are installed, "
        "and 'none' serves text alone"
    )] = "auto"
