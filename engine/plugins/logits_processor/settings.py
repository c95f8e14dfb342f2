"""The part of the section [plugins] about logits processors."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class LogitsProcessorSettings(Addition, frozen=True):
    """The part of [plugins] about logits processors."""

    table: ClassVar[str] = "plugins"

    logits_processors: Annotated[list[str], key(
        "Logits processors that requests may name in logits_processors, applied in this order"
    )] = []
