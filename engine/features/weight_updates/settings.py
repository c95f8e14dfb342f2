"""The part of the section [scheduler] about weights that change."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class VersionSettings(Addition, frozen=True):
    """The part of [scheduler] about weights that change."""

    table: ClassVar[str] = "scheduler"

    max_weight_versions: Annotated[int, key(
        "Most versions of the weights that the tokens of one request may have, unless an update has another limit; the "
        "request ends with 'abort' at one more; 0 for no limit", ge=0, changed="live"
    )] = 0
