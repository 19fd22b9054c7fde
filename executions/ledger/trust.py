"""Which keys are trusted: those that the operator configured, and those that they have signed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.conf import settings
from django.db import transaction

from executions.kernel.audit import current_actor
from executions.ledger.entry import (
    Head,
    LedgerUnavailable,
    SigningKey,
    add,
    ensure_ours,
    is_signed_by,
    keyring,
    parse,
    public_key_id,
    read_head,
    signed_bytes,
    signing_key,
)
from executions.ledger.models import LedgerEntry

KEY = "ledger_key"


def trusted_keys() -> dict[str, str]:
    """Public keys by id, LEDGER_KEYS' own first. Raises LedgerUnavailable."""
    trusted = configured_keys()
    introductions = _introductions()
    known = 0
    while known != len(trusted):
        known = len(trusted)
        for entry, stated in introductions:
            public_key = trusted.get(str(stated.get("key_id")))
            if (
                stated["subject"] not in trusted
                and public_key is not None
                and is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature)
            ):
                trusted[stated["subject"]] = stated["public_key"]
    return trusted


def configured_keys() -> dict[str, str]:
    """What the operator's settings alone say. Raises LedgerUnavailable."""
    trusted = {key.key_id: key.public_key for key in keyring().values()}
    for public_key in settings.LEDGER_TRUSTED_KEYS:
        try:
            Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        except ValueError:
            raise LedgerUnavailable(
                f"LEDGER_TRUSTED_KEYS: {public_key!r} is not a public key. Set the public_key that "
                "/api/v1/ledger/keys shows."
            ) from None
        trusted.setdefault(public_key_id(public_key), public_key)
    return trusted


def _introduces(stated: Mapping[str, Any]) -> bool:
    """Whether an entry names a key, and names it rightly."""
    public_key, subject = stated.get("public_key"), stated.get("subject")
    try:
        return (
            stated.get("kind") == KEY
            and isinstance(public_key, str)
            and public_key_id(public_key) == subject
        )
    except ValueError:
        return False


def introduced_keys() -> dict[str, str]:
    """Every key that some entry names, by its id. Nothing says that it is to be trusted."""
    return {stated["subject"]: stated["public_key"] for _, stated in _introductions()}


def _introductions() -> list[tuple[LedgerEntry, dict[str, Any]]]:
    """What claims to name a key: nothing is believed of it yet."""
    found = []
    for entry in LedgerEntry.objects.filter(kind=KEY).order_by("sequence").iterator():
        stated = parse(entry.statement)
        if stated is not None and _introduces(stated):
            found.append((entry, stated))
    return found


def introduce(key: SigningKey, head: Head | None) -> Head:
    """Introduce `key`, signed by the key before it, and return the head after that.

    A head that none of our keys signed is not continued: our signature would vouch for it.
    """
    if head is None:
        return _name(head, key, key.key_id, key.public_key)
    ensure_ours(head)
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
