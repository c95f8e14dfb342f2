"""The part of the section [plugins] about scheduling policies."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class PolicySettings(Addition, frozen=True):
    """The part of [plugins] about scheduling policies."""

    table: ClassVar[str] = "plugins"

    policy: Annotated[str, key(
        "Order of waiting requests: priority, fcfs, lpm, fair; 'auto' is fair if clients have keys, else "
        "priority", changed="live"
    )] = "auto"
