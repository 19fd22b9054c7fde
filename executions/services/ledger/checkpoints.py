"""How far the ledger got, kept outside the database.

The signatures cannot show that the newest entries are gone, or that the whole database is an old
backup: what is left is then a valid ledger. These two files can, the better the further they are
from the database: LEDGER_CHECKPOINTS names their folder.

`head.json` is the newest entry that was committed, replaced in place at every commit.
`checkpoints.jsonl` gets a signed line every thousand entries and every hour.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError
from django.utils import timezone

from executions.models import LedgerEntry
from executions.services.ledger.canonical import canonical, moment
from executions.services.ledger.keyring import (
    LedgerUnavailable,
    is_signed_by,
    keyring,
    signing_key,
)

logger = logging.getLogger(__name__)

EVERY = 1000
_HEAD = "head.json"
_HISTORY = "checkpoints.jsonl"
# The head is overwritten in place, so it must always be of one length.
_HEAD_BYTES = 128


@dataclass(frozen=True)
class Point:
    """The entry `sequence` had this digest."""

    sequence: int
    digest: str


def folder() -> Path | None:
    """Where checkpoints are kept; None when they are turned off."""
    return Path(settings.LEDGER_CHECKPOINTS) if settings.LEDGER_CHECKPOINTS else None


def note(sequence: int, digest: str, previous: str) -> None:
    """Remember a committed entry and the digest of the one before.

    Too late to undo it, so a failure is logged and not raised.
    """
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _raise_head(place, Point(sequence, digest), previous)
        if sequence % EVERY == 0:
            _write_line(place / _HISTORY, Point(sequence, digest))
    except (OSError, DatabaseError, LedgerUnavailable) as error:
        logger.critical("the ledger's checkpoint %s could not be written: %s", sequence, error)


def write_checkpoint() -> Point | None:
    """Add a signed line for the newest entry, unless it has one. Returns what was written."""
    place = folder()
    newest = LedgerEntry.objects.order_by("-sequence").first()
    if place is None or newest is None:
        return None
    point = Point(newest.sequence, newest.digest)
    known, _ = history()
    if known and known[-1].sequence >= point.sequence:
        return None
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _raise_head(place, point)
    _write_line(place / _HISTORY, point)
    return point


def head() -> Point | None:
    """The newest entry that was ever committed here. Raises ValueError for a file that is none."""
    place = folder()
    if place is None or not (place / _HEAD).exists():
        return None
    return _parse(json.loads((place / _HEAD).read_text(encoding="ascii")))


def history() -> tuple[list[Point], list[int]]:
    """The signed checkpoints, oldest first, and the numbers of the lines that are not ours."""
    place = folder()
    if place is None or not (place / _HISTORY).exists():
        return [], []
    public_keys = {key.key_id: key.public_key for key in keyring().values()}
    for entry in LedgerEntry.objects.filter(kind="ledger_key"):
        public_keys.setdefault(entry.stated["subject"], entry.stated["public_key"])
    points, refused = [], []
    with (place / _HISTORY).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                signed = json.loads(line)
                signature = signed.pop("signature")
                if not is_signed_by(public_keys[signed["key_id"]], canonical(signed), signature):
                    raise ValueError("wrong signature")
                points.append(_parse(signed))
            except (KeyError, TypeError, AttributeError, ValueError):
                refused.append(number)
    return points, refused


def set_aside() -> list[Path]:
    """Begin anew, keeping the files under another name. Where they went."""
    place = folder()
    moved: list[Path] = []
    if place is None:
        return moved
    stamp = timezone.now().strftime("%Y%m%dT%H%M%S%f")
    for name in (_HEAD, _HISTORY):
        if (place / name).exists():
            target = place / f"{name}.{stamp}"
            (place / name).rename(target)
            moved.append(target)
    return moved


def _raise_head(place: Path, point: Point, previous: str = "") -> None:
    """Overwrite the head unless it is further: commits may be noted out of order.

    A head that is none of the ledger's entries any more is kept as a checkpoint before: the
    database went back, and once the ledger has grown past it, nothing else would tell.
    """
    descriptor = os.open(place / _HEAD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        known = _read_head(descriptor)
        if known is not None:
            if known.sequence >= point.sequence:
                return
            if not _is_followed(known, point, previous):
                logger.critical(
                    "the ledger's entry %s is not what was committed: an older copy of the "
                    "database is in use. Run `manage.py verify_ledger`.",
                    known.sequence,
                )
                _write_line(place / _HISTORY, known)
        line = json.dumps(asdict(point)).ljust(_HEAD_BYTES - 1) + "\n"
        os.pwrite(descriptor, line.encode("ascii"), 0)
    finally:
        os.close(descriptor)


def _is_followed(known: Point, point: Point, previous: str) -> bool:
    if known.sequence == point.sequence - 1 and previous:
        return known.digest == previous
    return LedgerEntry.objects.filter(sequence=known.sequence, digest=known.digest).exists()


def _read_head(descriptor: int) -> Point | None:
    text = os.pread(descriptor, _HEAD_BYTES, 0)
    if not text:
        return None
    try:
        return _parse(json.loads(text))
    except ValueError:
        logger.critical("the ledger's head.json is damaged and was written anew")
        return None


def _write_line(path: Path, point: Point) -> None:
    key = signing_key()
    checkpoint: dict[str, Any] = {
        **asdict(point),
        "kind": "checkpoint",
        "key_id": key.key_id,
        "at": moment(timezone.now()),
    }
    checkpoint["signature"] = key.sign(canonical(checkpoint))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(canonical(checkpoint) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _parse(read: Any) -> Point:
    if not isinstance(read, dict):
        raise ValueError("no checkpoint")
    sequence, digest = read.get("sequence"), read.get("digest")
    if not isinstance(sequence, int) or not isinstance(digest, str) or sequence < 1:
        raise ValueError("no checkpoint")
    return Point(sequence, digest)
