"""Adding an entry: under a lock, in the caller's transaction, signed together with its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from executions.models import LedgerEntry
from executions.services.actor import current_actor
from executions.services.ledger import checkpoints
from executions.services.ledger.canonical import canonical, digest, moment
from executions.services.ledger.keyring import (
    LedgerUnavailable,
    SigningKey,
    keyring,
    signing_key,
)

FORMAT = 1
FIRST_PREVIOUS = "0" * 64
# Any number that no other lock of this database uses.
_POSTGRES_LOCK = 0x1ED6E5

RESERVED = frozenset(
    ("ledger", "sequence", "previous", "key_id", "kind", "subject", "at", "signature")
)

# These two run within every execution. Through the ORM an entry took 0.55 ms, so it takes 0.20 ms.
_TABLE = LedgerEntry._meta.db_table
_SELECT_HEAD = f"SELECT sequence, digest, key_id FROM {_TABLE} ORDER BY sequence DESC LIMIT 1"  # noqa: S608
_INSERT = (
    f"INSERT INTO {_TABLE} (sequence, kind, execution_id, at, statement, digest, key_id, signature)"  # noqa: S608
    " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
)


class Head(NamedTuple):
    """The newest entry, as far as the next one needs it."""

    sequence: int
    digest: str
    key_id: str


def append(
    kind: str,
    subject: str,
    content: Mapping[str, Any],
    *,
    execution_id: UUID | None = None,
) -> LedgerEntry:
    """Enter what happened to `subject`, in the transaction that makes it happen.

    `content` is JSON without secrets. Opens a transaction when there is none. Raises
    LedgerUnavailable when no key may continue the ledger; the caller's change must then not be
    committed, as with any other error from here.
    """
    if taken := RESERVED & content.keys():
        raise ValueError(f"an entry names these itself: {', '.join(sorted(taken))}")
    if kind != "execution":
        content = {"actor": current_actor(), **content}
    with transaction.atomic(savepoint=False):
        head = _lock_head()
        key = signing_key()
        if head is None or head.key_id != key.key_id:
            head = _introduced(key, head)
        entry = _add(head, key, kind, subject, content, execution_id)
        transaction.on_commit(lambda: checkpoints.note(entry.sequence, entry.digest, head.digest))
    return entry


def _lock_head() -> Head | None:
    """The newest entry, which stays that until this transaction ends.

    SQLite's transactions begin as writers (see sandbox_site.database), and there is one writer.
    """
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_POSTGRES_LOCK])
        cursor.execute(_SELECT_HEAD)
        row = cursor.fetchone()
    return Head(*row) if row else None


def _introduced(key: SigningKey, head: Head | None) -> Head:
    """The head once the ledger says, by the word of the key before, that `key` signs as well.

    A head that none of our keys signed is not continued: our signature would vouch for it.
    """
    if head is None:
        introducer = key
    elif head.key_id not in keyring():
        raise LedgerUnavailable(
            f"The ledger was last signed with the key {head.key_id}, which LEDGER_KEYS does not "
            "hold. Put it back, after the new one, so that it can introduce the new one; if it is "
            "lost, run `manage.py adopt_ledger_key`."
        )
    elif _is_known(key):
        return head
    else:
        introducer = keyring()[head.key_id]
    entry = _add_key(key, introducer, head)
    return Head(entry.sequence, entry.digest, entry.key_id)


def adopt_key(reason: str) -> LedgerEntry | None:
    """Let the signing key introduce itself, because the key before is lost; None when it is not.

    What was entered before stays bound by the chain: the new key signs the digest it found.
    """
    with transaction.atomic(savepoint=False):
        head = _lock_head()
        key = signing_key()
        if head is None or head.key_id in keyring():
            return None
        return _add_key(key, key, head, reason=reason, actor=current_actor())


def _add_key(
    key: SigningKey, introducer: SigningKey, head: Head | None, **content: Any
) -> LedgerEntry:
    introduction = {"algorithm": "Ed25519", "public_key": key.public_key, **content}
    return _add(head, introducer, "ledger_key", key.key_id, introduction, None)


def _is_known(key: SigningKey) -> bool:
    introductions = LedgerEntry.objects.filter(kind="ledger_key")
    return any(entry.stated["subject"] == key.key_id for entry in introductions)


def _add(
    head: Head | None,
    key: SigningKey,
    kind: str,
    subject: str,
    content: Mapping[str, Any],
    execution_id: UUID | None,
) -> LedgerEntry:
    now = timezone.now()
    sequence = head.sequence + 1 if head else 1
    statement = canonical(
        {
            **content,
            "ledger": FORMAT,
            "sequence": sequence,
            "previous": head.digest if head else FIRST_PREVIOUS,
            "key_id": key.key_id,
            "kind": kind,
            "subject": subject,
            "at": moment(now),
        }
    )
    entry = LedgerEntry(
        sequence=sequence,
        kind=kind,
        execution_id=execution_id,
        at=now,
        statement=statement,
        digest=digest(statement),
        key_id=key.key_id,
        signature=key.sign(statement),
    )
    _insert(entry)
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
    ]
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, row)
