"""The part of the section [plugins] about linear layers."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class LinearSettings(Addition, frozen=True):
    """The part of [plugins] about linear layers."""

    table: ClassVar[str] = "plugins"

    linear: Annotated[str, key(
        "Matrix multiplication by weights; 'auto' measures the fastest of those for model.quantization",
        changed="executors"
    )] = "auto"
