"""Logging for every process: one JSON object per line on stderr."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """Time, level, logger and message, and each plain value that was passed as `extra`.

    An `extra` that is no plain value is left out: Django attaches whole requests to its records,
    and their text may hold a key.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and isinstance(value, str | int | float | None):
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configuration(level: str) -> dict[str, Any]:
    """For logging.config.dictConfig: everything goes to the root logger's one handler."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "sandbox_site.logs.JsonLines"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            "django": {"handlers": [], "level": "NOTSET", "propagate": True},
            # A refused request is the caller's news, told in the answer.
            "django.request": {"level": "ERROR"},
            "django.server": {"handlers": [], "propagate": True},
            "django-q": {"level": "WARNING"},
            # A line for every request that a provider makes.
            "httpx": {"level": "WARNING"},
            # At DEBUG it tells whole URLs and headers, with what is secret in them.
            "httpcore": {"level": "INFO"},
            "gunicorn.error": {"handlers": [], "level": "WARNING", "propagate": True},
            "gunicorn.access": {"handlers": [], "level": "INFO", "propagate": True},
        },
    }
