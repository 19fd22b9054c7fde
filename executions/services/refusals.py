"""Refusals of keys, as entries of the ledger of which nobody can make many.

Of each key there is at most one entry a minute for each reason, over all processes. All keys that
are not known are one: whoever makes them up has no more entries than one.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from django.db import Error as DatabaseFailure
from django.db import connection, transaction
from django.utils import timezone

from executions.kernel.text import storable
from executions.ledger.append import append
from executions.ledger.keyring import LedgerUnavailable
from executions.models.api_key import ApiKey
from executions.models.key_refusal import KeyRefusal
from sandbox_site.database import not_waiting_for_long

logger = logging.getLogger(__name__)

EVERY = timedelta(minutes=1)
UNKNOWN = "unknown"
_MOST_DETAIL = 200
_PATIENCE_SECONDS = 0.5

_TABLE = KeyRefusal._meta.db_table
# One statement, so that of several processes one alone enters it.
_CLAIM = (
    f"INSERT INTO {_TABLE} (subject, reason, entered_at) VALUES (%s, %s, %s)"  # noqa: S608
    " ON CONFLICT (subject, reason) DO UPDATE SET entered_at = excluded.entered_at"
    f" WHERE {_TABLE}.entered_at <= %s"
)

# By key and reason, when this process asked last: most of a flood ends here, without a query.
_asked: dict[tuple[str, str], float] = {}
_MOST_ASKED = 10_000


def note_refusal(
    api_key: ApiKey | None, reason: str, *, detail: str = "", address: str = ""
) -> None:
    """Enter that a key was refused, unless that was just entered.

    `reason` is one of a few words, `detail` what it was refused. It is refused all the same where
    nothing can be entered; the log then has it.
    """
    subject = UNKNOWN if api_key is None else str(api_key.pk)
    place, now = (subject, reason), time.monotonic()
    if now - _asked.get(place, -EVERY.total_seconds()) < EVERY.total_seconds():
        return
    if len(_asked) >= _MOST_ASKED:
        _asked.clear()
    try:
        with not_waiting_for_long(_PATIENCE_SECONDS), transaction.atomic():
            if _claim(subject, reason):
                _enter(api_key, reason, detail, address)
    except (DatabaseFailure, LedgerUnavailable) as error:
        logger.warning("the refusal of a key (%s) could not be entered: %s", reason, error)
        return
    _asked[place] = now


def _claim(subject: str, reason: str) -> bool:
    now = timezone.now()
    moments = [connection.ops.adapt_datetimefield_value(each) for each in (now, now - EVERY)]
    with connection.cursor() as cursor:
        cursor.execute(_CLAIM, [subject, reason, *moments])
        return bool(cursor.rowcount == 1)


def _enter(api_key: ApiKey | None, reason: str, detail: str, address: str) -> None:
    append(
        "refusal",
        UNKNOWN if api_key is None else api_key.prefix,
        {
            "actor": UNKNOWN if api_key is None else f"key:{api_key.prefix}",
            "tenant": None if api_key is None else api_key.tenant.slug,
            "key": None if api_key is None else storable(api_key.name),
            "reason": reason,
            "detail": storable(detail)[:_MOST_DETAIL],
            "address": storable(address)[:64],
        },
    )
