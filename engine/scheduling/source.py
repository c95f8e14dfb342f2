"""The source of a scheduler's planners.

Owns: the protocol.  Does not know: where settings come from.
"""

from typing import Protocol

from engine.scheduling.planner import Planner


class PlannerSource(Protocol):
    """It has the settings of planners.  overlap_depth: most steps in flight."""

    @property
    def overlap_depth(self) -> int: ...

    def build(self, num_pages: int) -> Planner:
        """Return a planner for a pool of so many pages."""
        ...

    def change(self, blueprint: bytes) -> None:
        """Use other settings from now on.  blueprint: as in ``Reconfigure``."""
        ...

    def retune(self, planner: Planner) -> None:
        """Give a planner the settings that can change while it works."""
        ...
