"""The part of the section [storage] about recordings."""

from typing import Annotated, ClassVar, Literal

from engine.settings.section import Addition, key


class RecordingSettings(Addition, frozen=True):
    """The part of [storage] about recordings."""

    table: ClassVar[str] = "storage"

    recording_mb: Annotated[int, key(
        "Memory for the last minutes of the scheduler's messages, written to the folder when something goes "
        "wrong; 0 for no recording", ge=0, le=4096
    )] = 32
    recording_prompts: Annotated[Literal["whole", "hashed"], key(
        "Tokens in recordings: unchanged, or replaced one for one"
    )] = "hashed"
