"""The part of the section [plugins] about tool parsers."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ToolParserSettings(Addition, frozen=True):
    """The part of [plugins] about tool parsers."""

    table: ClassVar[str] = "plugins"

    tool_parser: Annotated[str, key(
        "Format of the model's function calls; 'auto' detects it from the chat template"
    )] = "auto"
