"""The part of the section [plugins] about grammar engines."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class GrammarSettings(Addition, frozen=True):
    """The part of [plugins] about grammar engines."""

    table: ClassVar[str] = "plugins"

    grammar: Annotated[str, key("Engine that constrains output to a schema or grammar; 'auto' is llguidance")] = "auto"
