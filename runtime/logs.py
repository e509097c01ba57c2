"""Log lines for people and for machines. A record's `extra={"fields": {...}}` goes into the line."""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        value = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            value["exception"] = self.formatException(record.exc_info)
        return json.dumps(value, default=str)


class TextFormatter(logging.Formatter):
    """The same for reading."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: value for key, value in getattr(record, "fields", {}).items() if value is not None}
        text = super().format(record)
        return " ".join([text, *(f"{key}={value}" for key, value in fields.items())])


def set_up(level: str = "info", json_lines: bool = False) -> None:
    """Send every logger's records to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
