"""The part of the section [plugins] about the policy of snapshots."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class SnapshotChoice(Addition, frozen=True):
    """The part of [plugins] about the policy of snapshots."""

    table: ClassVar[str] = "plugins"

    snapshots: Annotated[str, key(
        "Places in prompts where the prefix cache keeps recurrent states: ends; 'auto' is ends", changed="executors"
    )] = "auto"
