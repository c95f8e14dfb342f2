"""The part of the section [placement] about ranks on several machines."""

from typing import Annotated, ClassVar, Final

from engine.settings.section import Addition, Section, key
from engine.types.errors import ConfigError

MIN_KEY: Final = 32  # characters


class MachinesSettings(Addition, frozen=True):
    """The part of [placement] about ranks on several machines."""

    table: ClassVar[str] = "placement"

    cluster_key: Annotated[str, key(
        "Secret of at least 32 characters that ranks on other machines authenticate with; best set as "
        "CALLBOARD_PLACEMENT__CLUSTER_KEY; never printed"
    )] = ""
    join_timeout_s: Annotated[float, key(
        "Longest time for ranks on other machines to join, and to find the server", gt=0
    )] = 300.0

    def check(self, config: Section) -> None:
        """Raise ConfigError for a secret that is too short."""
        if 0 < len(self.cluster_key) < MIN_KEY:
            raise ConfigError(
                f"placement.cluster_key: {len(self.cluster_key)} characters, expected at least "
                f"{MIN_KEY}: openssl rand -hex 32 makes some"
            )
