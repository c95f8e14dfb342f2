"""The part of the section [storage] about traces of traffic."""

from typing import Annotated, Any, ClassVar

from engine.settings.section import Addition, key
from engine.types.errors import ConfigError


class TraceSettings(Addition, frozen=True):
    """The part of [storage] about traces of traffic."""

    table: ClassVar[str] = "storage"

    trace_mb: Annotated[int, key(
        "Most disk space for traces of traffic, without texts, for `callboard whatif`; 0 for no traces", ge=0
    )] = 0

    def check(self, config: Any) -> None:
        """Raise ConfigError for traces without a folder."""
        if self.trace_mb and not config.storage.folder:
            raise ConfigError(f"storage.trace_mb={self.trace_mb}: traces need storage.folder to lie below")
