"""Log lines: for people, or one JSON object each for machines.

Owns: both formats.  Does not know: who logs what; where lines go.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from server.exchange import FIELDS

Format = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JSONFormatter(logging.Formatter):
    """time, level, logger, message; then the fields of records that have some, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without line breaks."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure_logging(level: str, style: Format) -> None:
    """Send every logger's lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if style == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
