"""The part of the section [plugins] about observers."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ObserverSettings(Addition, frozen=True):
    """The part of [plugins] about observers."""

    table: ClassVar[str] = "plugins"

    observers: Annotated[list[str], key(
        "Receivers of finished requests and of cached pages: any number of names, e.g. ['log']"
    )] = []
