"""Logging for every process, on stderr: one JSON object per line, or text for who looks on."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from providers.slices import escape_line_ends

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
        for name, value in _plain_extras(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escape_line_ends(json.dumps(line, ensure_ascii=False))


class TerminalLines(logging.Formatter):
    """The same for a terminal: the time, the message, and the extras that say something.

    Characters that a terminal acts on are escaped: names and messages may be a stranger's.
    """

    # The message says the first two, and the record and the ledger have the others.
    _LEFT_OUT = frozenset(
        {"operation", "status", "timestamp", "ledger_digest", "ledger_sequence", "code_hash"}
        | {"request_id", "instance_id"}
    )
    # Of a run, whose record is found by its id.
    _OF_A_RUN = ("language", "tenant_id", "error_code", "execution_id")

    def format(self, record: logging.LogRecord) -> str:
        parts = [datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")]
        if record.levelno != logging.INFO:
            parts.append(record.levelname)
        if getattr(record, "operation", "") == "execute_code":
            return " ".join([*parts, *self._run(record)])
        parts.append(_printable(record.getMessage()))
        parts += [
            f"{name}={_printable(str(value))}"
            for name, value in _plain_extras(record).items()
            if value not in (None, "") and name not in self._LEFT_OUT
        ]
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            return "\n".join([" ".join(parts), *map(_printable, lines)])
        return " ".join(parts)

    def _run(self, record: logging.LogRecord) -> Iterator[str]:
        """How it ended, how long it took, and the record to look at."""
        yield _printable(str(getattr(record, "execution_status", "") or "ended"))
        if (duration := getattr(record, "duration_ms", None)) is not None:
            yield f"{duration} ms"
        for name in self._OF_A_RUN:
            if value := getattr(record, name, None):
                yield _printable(str(value))


def _plain_extras(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and isinstance(value, str | int | float | None)
    }


def _printable(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def format_for(choice: str) -> str:
    """ "json" or "text": what `choice` names, for "auto" text where stderr is a terminal."""
    if choice == "auto":
        return "text" if sys.stderr is not None and sys.stderr.isatty() else "json"
    return choice


def configuration(level: str, form: str) -> dict[str, Any]:
    """For logging.config.dictConfig: everything goes to the root logger's one handler.

    `form` is "json" or "text".
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "json": {"()": "sandbox_site.logs.JsonLines"},
            "text": {"()": "sandbox_site.logs.TerminalLines"},
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": form}},
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
