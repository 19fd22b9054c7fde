"""System checks: what must hold before executions may be recorded."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, register

from executions.ledger.entry import LedgerUnavailable, keyring
from executions.ledger.trust import configured_keys
from executions.runs.journal import leftover_files


@register(Tags.security)
def ledger_can_be_signed(**_: Any) -> list[CheckMessage]:
    """LEDGER_KEYS holds keys. Otherwise no execution could ever end."""
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


# Not among what every command checks: `verify_ledger` says itself that it could not verify.
@register("ledger")
def trusted_keys_are_keys(**_: Any) -> list[CheckMessage]:
    """LEDGER_TRUSTED_KEYS has none that is no key. Otherwise nobody could sign in."""
    try:
        configured_keys()
    except LedgerUnavailable as error:
        return [Error(error.message, hint="Correct LEDGER_TRUSTED_KEYS.", id="executions.E002")]
    return []


@register(Tags.files)
def journal_can_be_recorded(**_: Any) -> list[CheckMessage]:
    """Each file of the journal holds a result that somebody may still ask for."""
    return [
        checks.Warning(
            f"{path.name} of the journal holds the result of a run and cannot be recorded.",
            hint="Put back the key of FERNET_KEYS that it was written with, then run "
            "`manage.py record_journal --all`. See docs/database-outages.md.",
            id="executions.W001",
        )
        for path in leftover_files()
    ]
