"""The part of the section [plugins] about communication libraries."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class CommSettings(Addition, frozen=True):
    """The part of [plugins] about communication libraries."""

    table: ClassVar[str] = "plugins"

    comm: Annotated[str, key(
        "Communication library between ranks; 'auto' is 'local' for one rank, 'symmetric' for GPUs of one machine, "
        "else 'torch'", changed="executors"
    )] = "auto"
