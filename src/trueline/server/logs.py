"""One line per event on stderr, as text or JSON. Requests go by their ids, never by their text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

NAME = "trueline.server"


def start_logs(form: str, level: str) -> logging.Logger:
    logger = logging.getLogger(NAME)
    logger.setLevel(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger.handlers, logger.propagate = [handler], False
    # of requests that fail we tell ourselves; of connections that were cut there is no more to say
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    return logger


def event(logger: logging.Logger, what: str, level: int = logging.INFO, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, what, extra={"fields": given})


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {"time": _time(record), "level": record.levelname.lower(), "event": record.msg}
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        told = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname.lower():<7} {record.msg} {told}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: object) -> str:
    """What a client sends must not look like another line or field."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
