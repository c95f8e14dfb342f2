"""The part of the section [plugins] about attention backends."""

from typing import Annotated, ClassVar

from engine.settings.attention_names import AttentionNames
from engine.settings.section import Addition, key


class AttentionSettings(Addition, frozen=True):
    """The part of [plugins] about attention backends."""

    table: ClassVar[str] = "plugins"

    attention: Annotated[str | AttentionNames, key(
        "Attention backend, or { prefill = ..., decode = ... }; 'auto' picks by device and model", changed="executors"
    )] = "auto"
    race_s: Annotated[float, key(
        "Longest time for 'auto' to measure attention backends at the first start with a model's heads, if several "
        "can run; compilers have eight minutes before that; 0 measures nothing and uses a fixed order",
        ge=0, changed="executors"
    )] = 60.0
