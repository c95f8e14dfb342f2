"""The log of a run: what clients asked and got, what was broken, and which owner had how many pages.

Owns: the form of the log, JSON with one event a line.  Does not know: what is right; ``checker.py`` reads it.
"""

import json
from collections.abc import Callable
from typing import Any

Note = Callable[..., None]
"""A call ``note(event, field=value, ...)``."""


def no_note(event: str, **fields: Any) -> None:
    """Keep nothing."""


class Ledger:
    """The events of one run."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._clock: Callable[[], float] = float
        self._last: dict[str, dict[str, Any]] = {}

    def begin(self, clock: Callable[[], float]) -> None:
        """Take the time of events from a clock."""
        self._clock = clock

    def note(self, event: str, **fields: Any) -> None:
        """Keep an event."""
        self.lines.append(json.dumps({"t": round(self._clock(), 6), "event": event, **fields}))

    def note_change(self, event: str, **fields: Any) -> None:
        """Keep an event unless it is as the last one of its name."""
        if self._last.get(event) != fields:
            self._last[event] = fields
            self.note(event, **fields)
