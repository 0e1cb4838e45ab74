"""One JSON object a line on stderr: time, level, message, and what the caller adds as `extra={"told": {…}}`.

logging.getLogger("atom.access").info("request", extra={"told": {"status": 200}})
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec


class JSONLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "told", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure() -> None:
    """Send the loggers of atom and uvicorn's errors to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    for name, level in (("atom", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
