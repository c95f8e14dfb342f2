"""The part of the section [plugins] about reasoning parsers."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ReasoningParserSettings(Addition, frozen=True):
    """The part of [plugins] about reasoning parsers."""

    table: ClassVar[str] = "plugins"

    reasoning_parser: Annotated[str, key(
        "Format of the model's thoughts; 'none' returns them as text; 'auto' detects it from the chat template"
    )] = "auto"
