"""One row of the ledger, signed together with its place, and the newest row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection
from django.utils import timezone

from executions.ledger.entry_format import (
    FORMAT,
    bound_row_of,
    digest,
    moment,
    parse,
    place_bytes,
    signed_bytes,
    subject_of,
    write,
)
from executions.ledger.keyring import (
    LedgerAltered,
    LedgerUnavailable,
    SigningKey,
    is_signed_by,
    keyring,
)
from executions.ledger.models import LedgerEntry

logger = logging.getLogger(__name__)

# Any number that no other lock of this database uses.
_POSTGRES_LOCK = 0x1ED6E5
_SELECT = (
    "SELECT sequence, statement, digest, key_id, signature"  # noqa: S608
    f" FROM {LedgerEntry._meta.db_table} ORDER BY sequence DESC LIMIT 1"
)


class Row(NamedTuple):
    """What the database has in the row of the newest entry. All of it are claims."""

    sequence: int
    statement: str
    digest: str
    key_id: str
    signature: str


class Head(NamedTuple):
    """The newest entry, as far as the next one needs it."""

    sequence: int
    digest: str
    key_id: str
    signature: str = ""


class _Seen(NamedTuple):
    """The row that this process wrote or checked last, and the keys it was checked with."""

    row: Row | None = None
    keys: tuple[str, ...] = ()


_seen = _Seen()
_has_refused = False
# What was told of last: it is met with every look until it is mended.
_told: Row | None = None


def read_head(*, lock: bool) -> Head | None:
    """The newest entry; with `lock` it stays that until this transaction ends.

    Raises LedgerAltered for a row that is not what its key signed. One signed by a key that we do
    not have is returned: whether it may be continued is the caller's question.
    """
    global _has_refused
    if lock:
        lock_ledger()
    with connection.cursor() as cursor:
        cursor.execute(_SELECT)
        found = cursor.fetchone()
    if found is None:
        return None
    row = Row(*found)
    if _seen != (row, tuple(settings.LEDGER_KEYS)):
        if reason := _wrong(row):
            _has_refused = True
            raise _altered(row, reason)
        remember(row)
    return Head(row.sequence, row.digest, row.key_id, row.signature)


def lock_ledger() -> None:
    """Let nobody else enter anything until this transaction ends.

    SQLite's transactions begin as writers (see sandbox_site.database), and there is one writer.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_POSTGRES_LOCK])


def remember(row: Row) -> None:
    """Take a row for checked. Should its transaction be rolled back, none like it is ever met."""
    global _seen, _told
    _seen, _told = _Seen(row, tuple(settings.LEDGER_KEYS)), None


def ensure_ours(head: Head) -> None:
    """Raise LedgerUnavailable where none of our keys signed the newest entry: our signature after
    it would vouch for it."""
    global _has_refused
    if head.key_id not in keyring():
        _has_refused = True
        raise LedgerUnavailable(
            f"The ledger was last signed with the key {head.key_id}, which LEDGER_KEYS does not "
            "hold. Put it back, after the new one, so that it can introduce the new one; if it is "
            "lost, run `manage.py adopt_ledger_key`."
        )


def ensure_ledger() -> None:
    """Raise LedgerUnavailable where an entry was refused before, until it takes entries again.

    What runs could not be entered. Costs nothing while nothing was ever refused.
    """
    global _has_refused
    if _has_refused:
        head = read_head(lock=False)
        if head is not None:
            ensure_ours(head)
        _has_refused = False


def _wrong(row: Row) -> str:
    """What shows that the row is not ours; "" when it is, or when a key of others signed it."""
    stated = parse(row.statement)
    if stated is None:
        return "its statement is not canonical JSON"
    if stated["sequence"] != row.sequence:
        return "it stands in another place than it was signed for"
    if digest(row.statement) != row.digest:
        return "its digest is not its statement's"
    if stated.get("key_id") != row.key_id:
        return "it claims another key than the one that it was signed with"
    key = keyring().get(row.key_id)
    if key is not None and not is_signed_by(
        key.public_key, signed_bytes(stated, row.statement), row.signature
    ):
        return "this service's key did not sign it"
    return ""


_MESSAGE = (
    "The ledger takes no entry: its newest one is not what this service signed. "
    "Run `manage.py verify_ledger`."
)


def _altered(row: Row, reason: str) -> LedgerAltered:
    global _told
    if _told != row:
        _told = row
        logger.critical(
            "ALERT: the ledger's newest entry, %s, was not written by this service: %s. Nothing "
            "runs and nothing can be changed until it is repaired. Run `manage.py verify_ledger`, "
            "find out who can write to the database, and restore a backup.",
            row.sequence,
            reason,
            extra={"alert": "ledger_altered", "ledger_sequence": row.sequence},
        )
    return LedgerAltered(_MESSAGE)


FIRST_PREVIOUS = "0" * 64

# Runs within every execution. Through the ORM an entry took 0.55 ms, so it takes 0.20 ms.
_INSERT = (
    f"INSERT INTO {LedgerEntry._meta.db_table}"  # noqa: S608
    " (sequence, kind, execution_id, at, statement, digest, key_id, signature, bound_row,"
    " subject) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
)


def add(
    head: Head | None,
    key: SigningKey,
    kind: str,
    subject: str,
    content: Mapping[str, Any],
    execution_id: UUID | None = None,
) -> LedgerEntry:
    """Write the entry after `head`, which this transaction holds; None for the first one."""
    now = timezone.now()
    sequence = head.sequence + 1 if head else 1
    stated = {
        **content,
        "ledger": FORMAT,
        "sequence": sequence,
        "previous": head.digest if head else FIRST_PREVIOUS,
        "key_id": key.key_id,
        "kind": kind,
        "subject": subject,
        "at": moment(now),
    }
    statement = write(stated)
    statement_digest = digest(statement)
    entry = LedgerEntry(
        sequence=sequence,
        kind=kind,
        execution_id=execution_id,
        at=now,
        statement=statement,
        digest=statement_digest,
        key_id=key.key_id,
        signature=key.sign(place_bytes(sequence, statement_digest)),
        bound_row=bound_row_of(stated),
        subject=subject_of(stated),
    )
    _insert(entry)
    remember(Row(sequence, statement, statement_digest, entry.key_id, entry.signature))
    return entry


def _insert(entry: LedgerEntry) -> None:
    execution_id: Any = entry.execution_id
    if execution_id is not None and not connection.features.has_native_uuid_field:
        execution_id = execution_id.hex
    row = [
        entry.sequence,
        entry.kind,
        execution_id,
        connection.ops.adapt_datetimefield_value(entry.at),
        entry.statement,
        entry.digest,
        entry.key_id,
        entry.signature,
        entry.bound_row,
        entry.subject,
    ]
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, row)
