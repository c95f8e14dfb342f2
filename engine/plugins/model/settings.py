"""The part of the section [plugins] about model families."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ModelFamilySettings(Addition, frozen=True):
    """The part of [plugins] about model families."""

    table: ClassVar[str] = "plugins"

    models: Annotated[list[str], key(
        "Model families that are tried before the built-in ones; 'transformers' reads all decoders", changed="executors"
    )] = []
