"""A section of the configuration: its base class, and the description of a setting.

Owns: how a setting says what it is for and how it changes.  Does not know: any setting.
"""

from typing import Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

Changed = Literal["live", "executors", "fixed"]
"""How a setting changes while the server runs: at once, by replacing the executors, or not at all."""


def key(description: str, *, changed: Changed | None = None, is_place: bool = False, **bounds: Any) -> Meta:
    """Return the description of a setting.  changed: how it changes, if not as its section does.

    is_place: it names a place on disk or network; only the file on the server's own disk may change it.
    bounds: limits of its value, as ``msgspec.Meta`` accepts them."""
    extra = {**({} if changed is None else {"changed": changed}), "is_place": is_place}
    return Meta(description=description, extra=extra, **bounds)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A TOML table.  Unknown keys are errors.  changed: how its settings change, unless their ``key`` differs."""

    changed: ClassVar[Changed] = "fixed"


class Addition(Section, frozen=True):
    """Settings that a folder adds to the section ``table``, or brings as that section if the core has none."""

    table: ClassVar[str]

    @classmethod
    def of(cls, config: Section) -> Self:
        """Return these settings of a whole configuration."""
        return cls.read(getattr(config, cls.table))

    @classmethod
    def read(cls, section: Section) -> Self:
        """Return these settings of the section that they are in."""
        return cls(**{name: getattr(section, name) for name in cls.__struct_fields__})

    def recorded(self) -> dict[str, Any]:
        """Return the settings, of a section of its own, that plans depend on, as a trace has them: without places."""
        return {}

    def check(self, config: Any) -> None:
        """Raise ConfigError for values that contradict each other, or other settings of ``config``."""


class Array(Section, frozen=True):
    """One of the tables [[table]] of a file, with which a folder reads a configuration of its own kind.

    advice: what to do where that kind cannot be used."""

    table: ClassVar[str]
    advice: ClassVar[str]
