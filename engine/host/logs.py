"""Log lines: for people, or one JSON object each for machines.

Owns: both formats, and which of them this process writes.  Does not know: who logs what; where lines go.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec

Format = Literal["text", "json"]
FIELDS = "fields"  # of a log record: the same as its text, for logs that machines read


class JSONFormatter(logging.Formatter):
    """time, level, logger, message; then the fields of records that have some, and the traceback if there is one.

    process: what every line names as its process, if anything."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """One line without line breaks."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class LogSettings(msgspec.Struct, frozen=True, array_like=True):
    """How a process logs; a child is told its parent's.  level: as the logging module counts."""

    level: int
    style: Format

    @classmethod
    def here(cls) -> "LogSettings":
        """Of this process."""
        root = logging.getLogger()
        is_json = any(isinstance(handler.formatter, JSONFormatter) for handler in root.handlers)
        return cls(root.getEffectiveLevel(), "json" if is_json else "text")

    def apply(self, process: str = "") -> None:
        """Send every logger's lines to standard error.  process: the name of this one among several."""
        text = f"%(asctime)s %(levelname)-7s {process and process + ' '}%(name)s: %(message)s"
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JSONFormatter(process) if self.style == "json" else logging.Formatter(text))
        logging.basicConfig(level=self.level, handlers=[handler])
