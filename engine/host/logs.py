"""Log lines: text for people, or one JSON object each for machines.

Owns: both formats, and the choice of this process.  Does not know: the loggers, the destination of the lines.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import msgspec

Format = Literal["text", "json"]
FIELDS = "fields"  # attribute of a log record: its content as fields, for logs that machines read


class JSONFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, the record's fields if any, the traceback if any.

    process: the process name in every line; '' leaves it out."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return one line without line breaks."""
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
    """The log settings of a process, which its children take over.  level: a level of the logging module."""

    level: int
    style: Format

    @classmethod
    def here(cls) -> "LogSettings":
        """Return the settings of this process."""
        root = logging.getLogger()
        is_json = any(isinstance(handler.formatter, JSONFormatter) for handler in root.handlers)
        return cls(root.getEffectiveLevel(), "json" if is_json else "text")

    def apply(self, process: str = "") -> None:
        """Send every logger's lines to standard error.  process: the name of this process."""
        text = f"%(asctime)s %(levelname)-7s {process and process + ' '}%(name)s: %(message)s"
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JSONFormatter(process) if self.style == "json" else logging.Formatter(text))
        logging.basicConfig(level=self.level, handlers=[handler])
