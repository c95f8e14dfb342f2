"""The kind of the policies of snapshots."""

from typing import Final

from engine.plugins.kind import new_kind

SNAPSHOTS: Final = "snapshots"
KIND: Final = new_kind(
    SNAPSHOTS, "snapshot_policy", "ends", decides=True, default="ends", because="prompts go on where others ended"
)
