"""Which keys are believed. It begins with what the operator configured, not with the database.

A key of LEDGER_KEYS or LEDGER_TRUSTED_KEYS is trusted, and so is every key that an entry of kind
`ledger_key`, signed by a trusted key, names. At a rotation the old key names the new one and the
new one the old, so that either of them, configured alone, proves the whole ledger.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.conf import settings

from executions.models.ledger_entry import LedgerEntry
from executions.services.ledger.formats import parse, signed_bytes
from executions.services.ledger.keyring import (
    LedgerUnavailable,
    is_signed_by,
    keyring,
    public_key_id,
)

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
