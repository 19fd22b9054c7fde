"""How far the ledger got, kept outside the database.

The signatures cannot show that the newest entries are gone, or that the whole database is an old
backup: what is left is then a valid ledger. These two files can, the better the further they are
from the database: `checkpoint_places` has where they are.

`head.json` is the newest entry that was committed, with its signature, replaced in place at every
commit. `checkpoints.jsonl` gets a line every thousand entries and every hour, signed and with the
hash of the line before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from executions.models.ledger_entry import LedgerEntry
from executions.services.ledger.canonical import canonical, digest, moment
from executions.services.ledger.checkpoint_places import Behind, Place, place_of_checkpoints
from executions.services.ledger.findings import Verification
from executions.services.ledger.formats import FORMAT, line_bytes, place_bytes
from executions.services.ledger.head import Head
from executions.services.ledger.keyring import LedgerUnavailable, is_signed_by, signing_key
from executions.services.ledger.trust import configured_keys, trusted_keys

logger = logging.getLogger(__name__)

EVERY = 1000
# The head is overwritten in place, so it must always be of one length.
_HEAD_BYTES = 320
_FIRST_LINE = "0" * 64

# Checks the entries between two sequence numbers, as `verification.verify_entries` does.
VerifyEntries = Callable[[int, int], Verification]


@dataclass(frozen=True)
class Point:
    """The entry `sequence` had this digest, as the key has signed."""

    sequence: int
    digest: str
    key_id: str
    signature: str


@dataclass
class History:
    """The lines of `checkpoints.jsonl`, oldest first."""

    points: list[Point] = field(default_factory=list)
    # Numbers of lines that are not ours, or that do not follow the one before.
    damaged: list[int] = field(default_factory=list)
    # By line: at which entry there was no `head.json` any more.
    begun: dict[int, int] = field(default_factory=dict)


def where() -> str:
    """Where checkpoints are kept, for messages; "" when they are turned off."""
    place = place_of_checkpoints()
    return place.name if place else ""


def note(point: Point, previous: Head | None) -> None:
    """Remember a committed entry; `previous` is the one before, None for the ledger's first.

    Too late to undo it, so a failure is logged and not raised. Where the files are far away it is
    done in the background, for the newest of several.
    """
    place = place_of_checkpoints()
    if place is None:
        return
    if place.is_far:
        _behind.note(point, previous)
    else:
        _note(place, point, previous)


def _note(place: Place, point: Point, previous: Head | None) -> bool:
    try:
        is_missing = previous is not None and place.head() is None
        _raise_head(place, point, previous)
        if is_missing:
            _write_line(place, point, begun=True)
        elif point.sequence % EVERY == 0:
            _write_line(place, point)
    except (OSError, DatabaseError, LedgerUnavailable) as error:
        logger.critical(
            "the ledger's checkpoint %s could not be written: %s", point.sequence, error
        )
        return False
    return True


_behind = Behind(lambda point, previous: _note_far(point, previous), EVERY)


def _note_far(point: Point, previous: Head | None) -> bool:
    place = place_of_checkpoints()
    return place is None or _note(place, point, previous)


def write_checkpoint(verify_entries: VerifyEntries) -> Point | None:
    """Add a signed line for the newest entry, unless it has one, behind those that are missing,
    which `verify_entries` has to prove. Returns what was written.

    Raises LedgerUnavailable where the files cannot be read.
    """
    place = place_of_checkpoints()
    newest = LedgerEntry.objects.order_by("-sequence").first()
    if place is None or newest is None:
        return None
    known = {each.sequence: each.digest for each in history(trusted_keys()).points}
    with _readable():
        is_behind = _add_missing_lines(place, sorted(known), newest.sequence, verify_entries)
    # Behind an older one that was added, the newest entry's is written again: it is to be the last.
    is_again = is_behind and known.get(newest.sequence) == newest.digest
    if known and max(known) >= newest.sequence and not is_again:
        return None
    point = _signed_point(newest)
    with _readable():
        is_missing = place.head() is None
        _raise_head(place, point)
        _write_line(place, point, begun=is_missing)
    return point


def _add_missing_lines(
    place: Place, noted: list[int], end: int, verify_entries: VerifyEntries
) -> bool:
    """Add the lines that are due and were never written: what names a key is not noted, and the
    files may be full or away for a moment, or the process killed, when an entry is committed.

    Only where all entries between the lines before and after it are signed and follow each other,
    with these lines too: a late line must say nothing that they do not prove.
    """
    is_added = False
    for before, after in pairwise([*noted, end]):
        due = range(before - before % EVERY + EVERY, min(after, end), EVERY)
        if not due:
            continue
        found = verify_entries(before, after)
        if found.omitted or any(each.kind != "missing checkpoint" for each in found.findings):
            continue
        for entry in LedgerEntry.objects.filter(sequence__in=due).order_by("sequence"):
            _write_line(place, _signed_point(entry))
            is_added = True
    return is_added


def head() -> Point | None:
    """What `head.json` says, None without one. Raises ValueError for a file that says nothing, and
    LedgerUnavailable for one that cannot be read."""
    place = place_of_checkpoints()
    with _readable():
        text = place.head() if place else None
    return _parse(json.loads(text)) if text is not None else None


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerUnavailable(
            f"The ledger's checkpoints in {where()} cannot be read or written: {error}"
        ) from error


def is_signed(point: Point, public_keys: dict[str, str]) -> bool:
    """Whether one of these keys signed the entry that the point tells of."""
    public_key = public_keys.get(point.key_id)
    message = place_bytes(point.sequence, point.digest)
    return public_key is not None and is_signed_by(public_key, message, point.signature)


def newest_line() -> tuple[int, datetime] | None:
    """The entry of the last line of `checkpoints.jsonl`, and when that was written; None where
    there is none, or no trusted key signed it. Raises LedgerUnavailable."""
    place = place_of_checkpoints()
    text = ""
    with _readable():
        for line_text in place.lines() if place else ():
            text = line_text
    try:
        line = json.loads(text)
        signature = line.pop("signature")
        if not is_signed_by(trusted_keys()[line["key_id"]], line_bytes(line), signature):
            return None
        return _parse(line).sequence, datetime.fromisoformat(line["at"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def history(public_keys: dict[str, str]) -> History:
    """What `checkpoints.jsonl` says, as far as these keys signed it. Raises LedgerUnavailable."""
    found = History()
    place = place_of_checkpoints()
    if place is None:
        return found
    previous = _FIRST_LINE
    with _readable():
        for number, text in enumerate(place.lines(), 1):
            try:
                line = json.loads(text)
                signature = line.pop("signature")
                if not is_signed_by(public_keys[line["key_id"]], line_bytes(line), signature):
                    raise ValueError("wrong signature")
                if line["previous"] != previous:
                    raise ValueError("a line before is gone")
                point = _parse(line)
            except (KeyError, TypeError, AttributeError, ValueError):
                found.damaged.append(number)
            else:
                found.points.append(point)
                if line.get("begun"):
                    found.begun[number] = point.sequence
            previous = digest(text.rstrip("\n"))
    return found


def set_aside() -> list[str]:
    """Begin anew, keeping the files under another name. Where they went."""
    place = place_of_checkpoints()
    with _readable():
        return place.set_aside(timezone.now().strftime("%Y%m%dT%H%M%S%f")) if place else []


def _raise_head(place: Place, point: Point, previous: Head | None = None) -> None:
    """Overwrite the head unless it is further: commits may be noted out of order.

    A head that is none of the ledger's entries any more is kept as a checkpoint before: the
    database went back, and once the ledger has grown past it, nothing else would tell.
    """
    line = json.dumps(asdict(point)).ljust(_HEAD_BYTES - 1) + "\n"

    def raised(text: str) -> str | None:
        known = _read_head(text)
        if known is not None and not _is_noted(known, previous) and _is_ours(known):
            if known.sequence >= point.sequence:
                return None
            if not LedgerEntry.objects.filter(
                sequence=known.sequence, digest=known.digest
            ).exists():
                logger.critical(
                    "the ledger's entry %s is not what was committed: an older copy of the "
                    "database is in use. Run `manage.py verify_ledger`.",
                    known.sequence,
                )
                _write_line(place, known)
        return line

    place.change_head(raised)


def _is_noted(known: Point, previous: Head | None) -> bool:
    """Whether the head is the entry before, which was checked before this one was entered."""
    return previous is not None and known == Point(
        previous.sequence, previous.digest, previous.key_id, previous.signature
    )


def _is_ours(known: Point) -> bool:
    """Whether the file says what one of our keys signed."""
    ours = is_signed(known, configured_keys()) or is_signed(known, trusted_keys())
    if not ours:
        logger.critical(
            "the ledger's head.json was not written by this service, and is written again"
        )
    return ours


def _read_head(text: str) -> Point | None:
    if not text:
        return None
    try:
        return _parse(json.loads(text))
    except ValueError:
        logger.critical("the ledger's head.json is damaged and was written again")
        return None


def _signed_point(entry: LedgerEntry) -> Point:
    return Point(entry.sequence, entry.digest, entry.key_id, entry.signature)


def _write_line(place: Place, point: Point, *, begun: bool = False) -> None:
    key = signing_key()

    def added(last: str) -> str:
        line: dict[str, Any] = {
            "ledger": FORMAT,
            "kind": "checkpoint",
            "sequence": point.sequence,
            "digest": point.digest,
            "key_id": key.key_id,
            "at": moment(timezone.now()),
            "previous": digest(last.rstrip("\n")) if last else _FIRST_LINE,
            **({"begun": True} if begun else {}),
        }
        line["signature"] = key.sign(line_bytes(line))
        # Of a line that a crash cut off, the rest of the file is kept apart.
        gap = "\n" if last and not last.endswith("\n") else ""
        return f"{gap}{canonical(line)}\n"

    place.append(added)


def _parse(read: Any) -> Point:
    if not isinstance(read, dict):
        raise ValueError("no checkpoint")
    sequence, digest = read.get("sequence"), read.get("digest")
    if not isinstance(sequence, int) or not isinstance(digest, str) or sequence < 1:
        raise ValueError("no checkpoint")
    return Point(sequence, digest, str(read.get("key_id", "")), str(read.get("signature", "")))
