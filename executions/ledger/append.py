"""Adding an entry: under a lock, in the caller's transaction, signed together with its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.db import transaction

from executions.kernel.audit import current_actor, log_entry
from executions.ledger import checkpoints
from executions.ledger.entry import add, read_head
from executions.ledger.keyring import signing_key
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import introduced

RESERVED = frozenset(
    ("ledger", "sequence", "previous", "key_id", "kind", "subject", "at", "signature")
)


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
        head = read_head(lock=True)
        is_first = head is None
        key = signing_key()
        if head is None or head.key_id != key.key_id:
            head = introduced(key, head)
        entry = add(head, key, kind, subject, content, execution_id)
        point = checkpoints.Point(entry.sequence, entry.digest, entry.key_id, entry.signature)
        transaction.on_commit(lambda: checkpoints.note(point, None if is_first else head))
        if kind != "execution":
            transaction.on_commit(lambda: log_entry(entry, subject, content))
    return entry
