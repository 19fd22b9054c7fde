"""How a key comes to be trusted: by the signature of one that is."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from executions.kernel.audit import current_actor
from executions.models.ledger_entry import LedgerEntry
from executions.services.ledger.formats import parse, signed_bytes
from executions.services.ledger.head import Head, read_head, require_ours
from executions.services.ledger.keyring import (
    LedgerUnavailable,
    SigningKey,
    is_signed_by,
    keyring,
    signing_key,
)
from executions.services.ledger.trust import KEY, introduced_keys
from executions.services.ledger.writing import add


def introduced(key: SigningKey, head: Head | None) -> Head:
    """The head once the ledger says, by the word of the key before, that `key` signs as well.

    A head that none of our keys signed is not continued: our signature would vouch for it.
    """
    if head is None:
        return _name(head, key, key.key_id, key.public_key)
    require_ours(head)
    before = keyring()[head.key_id]
    if not _has_named(before, key):
        head = _name(head, before, key.key_id, key.public_key)
    if not _has_named(key, before):
        # The other way round too: the new key alone then proves what the old one signed.
        head = _name(head, key, before.key_id, before.public_key)
    return head


def adopt_key(reason: str) -> LedgerEntry | None:
    """Let the signing key introduce itself, because the key before is lost; None when it is not.

    What was entered before stays bound by the chain: the new key signs the digest it found, and
    names the keys that the ledger has had as trusted. That is the operator's word, so raises
    LedgerUnavailable where not even the ledger's own account of the lost key fits its signature.
    """
    with transaction.atomic(savepoint=False):
        head = read_head(lock=True)
        key = signing_key()
        if head is None or head.key_id in keyring():
            return None
        former = introduced_keys()
        newest = LedgerEntry.objects.get(sequence=head.sequence)
        stated = parse(newest.statement) or {}
        if not is_signed_by(
            former.get(head.key_id, ""), signed_bytes(stated, newest.statement), newest.signature
        ):
            raise LedgerUnavailable(
                f"The key {head.key_id}, which the newest entry names, did not sign it, by all "
                "that the ledger says of that key. Run `manage.py verify_ledger`."
            )
        head = _name(head, key, key.key_id, key.public_key, reason=reason, actor=current_actor())
        sequence = head.sequence
        for key_id, public_key in former.items():
            head = _name(head, key, key_id, public_key, reason=reason)
    return LedgerEntry.objects.get(sequence=sequence)


def _name(
    head: Head | None, signer: SigningKey, key_id: str, public_key: str, **content: Any
) -> Head:
    introduction = {"algorithm": "Ed25519", "public_key": public_key, **content}
    entry = add(head, signer, KEY, key_id, introduction)
    return Head(entry.sequence, entry.digest, entry.key_id, entry.signature)


def _has_named(signer: SigningKey, named: SigningKey) -> bool:
    introductions = LedgerEntry.objects.filter(kind=KEY, key_id=signer.key_id)
    return any(entry.stated["subject"] == named.key_id for entry in introductions)
