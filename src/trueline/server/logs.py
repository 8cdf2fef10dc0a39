"""One line per event on stderr, as text or JSON. Requests go by their ids, never by their text."""

from __future__ import annotations

import io
import json
import logging
import sys
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

NAME = "trueline.server"


def start_logs(form: str, level: str) -> logging.Logger:
    logger = logging.getLogger(NAME)
    logger.setLevel(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger.handlers, logger.propagate = [handler], False
    # our middleware logs requests that fail; connections that were cut need no line
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    return logger


class _Unbreakable(io.TextIOBase):
    """A stream whose reader may go away, as in `trueline serve … 2>&1 | head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def keep_stderr() -> None:
    """From now on nothing fails in this process because nobody reads what it says."""
    if not isinstance(sys.stderr, _Unbreakable):
        sys.stderr = _Unbreakable(sys.stderr)


def event(logger: logging.Logger, what: str, level: int = logging.INFO, **fields: object) -> None:
    if logger.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, what, extra={"fields": given})


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "event": record.msg}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = _traceback(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        given = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname.lower():<7} {record.msg} {given}".rstrip()
        return f"{line}\n{_traceback(record.exc_info[1])}" if record.exc_info else line


def _traceback(error: BaseException | None) -> str:
    """Where it was raised, and of which type. Not what it says: that may quote a request."""
    parts: list[str] = []
    while error is not None:
        parts.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nand then\n".join(reversed(parts))


def _plain(value: object) -> str:
    """What a client sends must not look like another line or field."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
