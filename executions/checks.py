"""System checks: what must hold before executions may be recorded."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register

from executions.services.ledger.keyring import LedgerUnavailable, keyring


@register(Tags.security)
def ledger_can_be_signed(**_: Any) -> list[CheckMessage]:
    """LEDGER_KEYS holds keys. Without one no execution could ever end."""
    try:
        keyring()
    except LedgerUnavailable as error:
        return [
            Error(
                error.message,
                hint="Run `make run` or `python manage.py bootstrap`, which generate a key, or set "
                "LEDGER_KEYS or LEDGER_KEYS_FILE.",
                id="executions.E001",
            )
        ]
    return []
