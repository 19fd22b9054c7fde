"""The mark that a complete verification leaves: up to which entry it has found nothing.

It is in `verified.json` beside the checkpoints, outside of the database, and signed with the
ledger's key. Who can write to the database can neither make one nor put an older one back. One that
is put back where the checkpoints are begins earlier, so that more is read. One of another ledger
names a digest that no entry here has.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace

from django.utils import timezone

from executions.ledger.checkpoints import checkpoint_store, readable
from executions.ledger.entry import (
    DOMAIN,
    FORMAT,
    LedgerUnavailable,
    canonical,
    is_signed_by,
    moment,
    signing_key,
)
from executions.ledger.models import Mark

logger = logging.getLogger(__name__)


class MarkAltered(Exception):
    """The file holds no mark that a trusted key signed."""


def sign(sequence: int, statement_digest: str, rows: str, executions: str) -> Mark:
    """Return the mark of a verification that found nothing up to this entry, signed. Raises
    LedgerUnavailable without a key."""
    key = signing_key()
    at = moment(timezone.now()) or ""
    unsigned = Mark(sequence, statement_digest, rows, executions, at, key.key_id)
    return replace(unsigned, signature=key.sign(_signed_bytes(unsigned)))


def keep(mark: Mark) -> None:
    """Write the mark. A failure is logged: the verification itself has ended well."""
    place = checkpoint_store()
    if place is None:
        return
    try:
        place.write_mark(canonical({"ledger": FORMAT, **asdict(mark)}) + "\n")
    except OSError as error:
        logger.error("the mark of a complete verification could not be written: %s", error)


def withdraw(public_keys: Mapping[str, str]) -> None:
    """Put a mark that is not active in the place of the one that is: what was found before it
    must be found again. It still tells of its last entry, as a checkpoint does. A failure is
    logged, and a mark that no key signed is left: it is a finding itself.
    """
    try:
        mark = newest(public_keys)
    except MarkAltered:
        return
    except LedgerUnavailable as error:
        logger.error("the mark of an earlier verification stays active: %s", error.message)
        return
    if mark is not None and mark.is_active:
        keep(sign(mark.sequence, mark.digest, rows="", executions=""))


def newest(public_keys: Mapping[str, str]) -> Mark | None:
    """Return the mark of the newest complete verification, which may not be active; None where
    there is none.

    Raises MarkAltered where none of these keys signed what the file holds, and LedgerUnavailable
    where it cannot be read.
    """
    place = checkpoint_store()
    with readable():
        text = place.mark() if place is not None else None
    if text is None:
        return None
    try:
        stated = json.loads(text)
        if stated.pop("ledger") != FORMAT:
            raise ValueError("an unknown format")
        mark = Mark(**stated)
        signed = _signed_bytes(mark)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise MarkAltered from error
    if not is_signed_by(public_keys.get(str(mark.key_id), ""), signed, str(mark.signature)):
        raise MarkAltered
    return mark


def _signed_bytes(mark: Mark) -> bytes:
    """What is signed of a mark: it begins as nothing else that the key signs."""
    stated = {name: value for name, value in asdict(mark).items() if name != "signature"}
    return DOMAIN + b"verified\n" + canonical({"ledger": FORMAT, **stated}).encode()
