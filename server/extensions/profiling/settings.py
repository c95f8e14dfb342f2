"""The part of the section [server] about profiles of steps."""

from typing import Annotated, ClassVar

from engine.settings.section import Addition, key


class ProfilingSettings(Addition, frozen=True):
    """The part of [server] about profiles of steps."""

    table: ClassVar[str] = "server"

    profile_folder: Annotated[str, key(
        "Folder for the executors' traces of steps from /start_profile; empty disables profiles",
        is_place=True
    )] = ""
