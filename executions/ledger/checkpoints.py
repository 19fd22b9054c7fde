"""How far the ledger got: kept outside the database, and compared with the ledger.

Checkpoints are in a folder, or in a bucket that every host writes to.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from django.conf import settings
from django.db import DatabaseError
from django.utils import timezone

from executions.kernel.storage import LEDGER, Folder, file_store
from executions.ledger.entry import (
    FORMAT,
    Head,
    LedgerUnavailable,
    canonical,
    digest,
    is_signed_by,
    line_bytes,
    moment,
    place_bytes,
    signing_key,
)
from executions.ledger.models import LedgerEntry, Mark, Verification
from executions.ledger.trust import configured_keys, trusted_keys
from providers.threads import NoThreadLeft, start_thread

if TYPE_CHECKING:
    from executions.kernel.bucket import Bucket

logger = logging.getLogger(__name__)

_HEAD = "head.json"
_HISTORY = "checkpoints.jsonl"
_MARK = "verified.json"
_FILES = (_HEAD, _HISTORY, _MARK)


class CheckpointStore(Protocol):
    """Three files, each changed by one at a time. Everything raises OSError where it fails."""

    name: str
    # Whether it is too far away to wait for at every commit.
    is_far: bool

    def head(self) -> str | None:
        """What `head.json` says; None without one."""

    def change_head(self, change: Callable[[str], str | None]) -> None:
        """Replace it by what `change` makes of it ("" of none), unless that is None."""

    def lines(self) -> Iterator[str]:
        """Of `checkpoints.jsonl`, with their ends; none of them without one."""

    def append(self, add: Callable[[str], str]) -> None:
        """Add what `add` makes of the last line, "" of an empty file."""

    def mark(self) -> str | None:
        """What `verified.json` says; None without one."""

    def write_mark(self, text: str) -> None:
        """Replace it."""

    def set_aside(self, stamp: str) -> list[str]:
        """Give the files another name. Where they went."""


def checkpoint_store() -> CheckpointStore | None:
    """As it is configured now; None when they are turned off."""
    if not settings.LEDGER_CHECKPOINTS:
        return None
    if settings.LEDGER_CHECKPOINTS != "storage":
        return FolderStore(Path(settings.LEDGER_CHECKPOINTS))
    storage = file_store(LEDGER)
    if isinstance(storage, Folder):
        return FolderStore(Path(storage.location))
    return BucketStore(cast("Bucket", storage))


class FolderStore:
    """`head.json` is overwritten in place at every commit, so it is always of one length."""

    is_far = False

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder

    def head(self) -> str | None:
        try:
            return (self._folder / _HEAD).read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return None

    def change_head(self, change: Callable[[str], str | None]) -> None:
        descriptor = self._open_locked(_HEAD, os.O_RDWR)
        try:
            text = os.pread(descriptor, 4096, 0).decode("ascii", errors="replace")
            if (changed := change(text)) is not None:
                os.pwrite(descriptor, changed.encode("ascii"), 0)
        finally:
            os.close(descriptor)

    def lines(self) -> Iterator[str]:
        try:
            with (self._folder / _HISTORY).open(encoding="utf-8", errors="replace") as lines:
                yield from lines
        except FileNotFoundError:
            return

    def append(self, add: Callable[[str], str]) -> None:
        descriptor = self._open_locked(_HISTORY, os.O_RDWR | os.O_APPEND)
        with os.fdopen(descriptor, "r+b", buffering=0) as stream:
            size = os.fstat(descriptor).st_size
            tail = os.pread(descriptor, 4096, max(0, size - 4096)).decode(errors="replace")
            stream.write(add(_last_line(tail)).encode())
            os.fsync(descriptor)

    def mark(self) -> str | None:
        try:
            return (self._folder / _MARK).read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return None

    def write_mark(self, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(prefix=f"{_MARK}.", dir=self._folder)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                if os.geteuid() == 0:
                    # The service reads it too, which may be another account.
                    owner = self._folder.stat()
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
                stream.write(text)
                stream.flush()
                os.fsync(descriptor)
            os.replace(draft, self._folder / _MARK)
        finally:
            Path(draft).unlink(missing_ok=True)

    def set_aside(self, stamp: str) -> list[str]:
        moved = []
        for name in _FILES:
            if (self._folder / name).exists():
                target = self._folder / f"{name}.{stamp}"
                (self._folder / name).rename(target)
                moved.append(str(target))
        return moved

    def _open_locked(self, name: str, flags: int) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._folder / name, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor


class BucketStore:
    """Objects that are replaced as a whole, and only by who has seen what they are."""

    is_far = True

    def __init__(self, bucket: Bucket) -> None:
        self.name = "the storage of STORAGE_URL"
        self._bucket = bucket

    def head(self) -> str | None:
        found, _ = self._bucket.read(_HEAD)
        return None if found is None else found.decode("ascii", errors="replace")

    def change_head(self, change: Callable[[str], str | None]) -> None:
        def change_bytes(found: bytes | None) -> bytes | None:
            text = change((found or b"").decode("ascii", errors="replace"))
            return None if text is None else text.encode("ascii")

        self._bucket.change(_HEAD, change_bytes)

    def lines(self) -> Iterator[str]:
        found, _ = self._bucket.read(_HISTORY)
        yield from (found or b"").decode(errors="replace").splitlines(keepends=True)

    def append(self, add: Callable[[str], str]) -> None:
        def longer(found: bytes | None) -> bytes:
            before = found or b""
            return before + add(_last_line(before[-4096:].decode(errors="replace"))).encode()

        self._bucket.change(_HISTORY, longer)

    def mark(self) -> str | None:
        found, _ = self._bucket.read(_MARK)
        return None if found is None else found.decode("ascii", errors="replace")

    def write_mark(self, text: str) -> None:
        self._bucket.replace(_MARK, text.encode("ascii"))

    def set_aside(self, stamp: str) -> list[str]:
        return [
            f"{name}.{stamp}" for name in _FILES if self._bucket.rename(name, f"{name}.{stamp}")
        ]


class AsyncWriter:
    """Notes entries on a thread of its own, so that no commit waits for a service far away.

    Of several that wait only the newest counts, and each that a line is due for. What fails waits
    for the next one. When the process ends it is waited for, as long as its client's time goes.
    """

    def __init__(self, write: Callable[[Any, Any], bool], every: int) -> None:
        self._write = write
        self._every = every
        self._waiting: dict[int, tuple[Any, Any]] = {}
        self._is_running = False
        self._lock = threading.Lock()

    def note(self, point: Any, previous: Any) -> None:
        with self._lock:
            due = [sequence for sequence in self._waiting if sequence % self._every]
            if not due or max(due) < point.sequence or not point.sequence % self._every:
                for sequence in due:
                    if sequence < point.sequence:
                        del self._waiting[sequence]
                self._waiting[point.sequence] = (point, previous)
            if self._is_running:
                return
            self._is_running = True
        try:
            # No daemon: the process waits for it.
            start_thread("checkpoints", self._work, daemon=False)
        except NoThreadLeft as error:
            logger.error("%s The next entry tries again.", error.message)
            self._note_end()

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                if not self._write(*taken):
                    self._note_end(taken)
                    return
        except BaseException:
            self._note_end()
            raise

    def _note_end(self, left: tuple[Any, Any] | None = None) -> None:
        with self._lock:
            if left is not None:
                self._waiting.setdefault(left[0].sequence, left)
            self._is_running = False

    def _take(self) -> tuple[Any, Any] | None:
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return None
            return self._waiting.pop(min(self._waiting))


def _last_line(tail: str) -> str:
    """The last line with its end, "" of an empty file."""
    return tail.splitlines(keepends=True)[-1] if tail else ""


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


_HEAD_FIELDS = tuple(each.name for each in fields(Point))


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
    place = checkpoint_store()
    return place.name if place else ""


def note(entry: LedgerEntry, previous: Head | None) -> None:
    """Remember a committed entry; `previous` is the one before, None for the ledger's first.

    Too late to undo it, so a failure is logged and not raised. Where the files are far away it is
    done in the background, for the newest of several.
    """
    place = checkpoint_store()
    if place is None:
        return
    if place.is_far:
        _behind.note(entry, previous)
    else:
        _note(place, entry, previous)


def _note(place: CheckpointStore, entry: LedgerEntry, previous: Head | None) -> bool:
    try:
        is_missing = previous is not None and place.head() is None
        _raise_head(place, entry, previous)
        if is_missing:
            _write_line(place, entry, begun=True)
        elif entry.sequence % EVERY == 0:
            _write_line(place, entry)
    except (OSError, DatabaseError, LedgerUnavailable) as error:
        logger.critical(
            "the ledger's checkpoint %s could not be written: %s", entry.sequence, error
        )
        return False
    return True


_behind = AsyncWriter(lambda entry, previous: _note_far(entry, previous), EVERY)


def _note_far(entry: LedgerEntry, previous: Head | None) -> bool:
    place = checkpoint_store()
    return place is None or _note(place, entry, previous)


def write_checkpoint(verify_entries: VerifyEntries) -> Point | None:
    """Add a signed line for the newest entry, unless it has one, behind those that are missing,
    which `verify_entries` has to prove. Returns what was written.

    Raises LedgerUnavailable where the files cannot be read.
    """
    place = checkpoint_store()
    newest = LedgerEntry.objects.order_by("-sequence").first()
    if place is None or newest is None:
        return None
    known = {each.sequence: each.digest for each in history(trusted_keys()).points}
    with readable():
        is_behind = _add_missing_lines(place, sorted(known), newest.sequence, verify_entries)
    # Behind an older one that was added, the newest entry's is written again: it is to be the last.
    is_again = is_behind and known.get(newest.sequence) == newest.digest
    if known and max(known) >= newest.sequence and not is_again:
        return None
    point = _signed_point(newest)
    with readable():
        is_missing = place.head() is None
        _raise_head(place, point)
        _write_line(place, point, begun=is_missing)
    return point


def _add_missing_lines(
    place: CheckpointStore, noted: list[int], end: int, verify_entries: VerifyEntries
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
    place = checkpoint_store()
    with readable():
        text = place.head() if place else None
    return _parse(json.loads(text)) if text is not None else None


@contextmanager
def readable() -> Iterator[None]:
    """Raise LedgerUnavailable for an OSError of the files."""
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
    place = checkpoint_store()
    text = ""
    with readable():
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
    place = checkpoint_store()
    if place is None:
        return found
    previous = _FIRST_LINE
    with readable():
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
    place = checkpoint_store()
    with readable():
        return place.set_aside(timezone.now().strftime("%Y%m%dT%H%M%S%f")) if place else []


def _raise_head(
    place: CheckpointStore, point: Point | LedgerEntry, previous: Head | None = None
) -> None:
    """Overwrite the head unless it is further: commits may be noted out of order.

    A head that is none of the ledger's entries any more is kept as a checkpoint before: the
    database went back, and once the ledger has grown past it, nothing else would tell.
    """
    said = {name: getattr(point, name) for name in _HEAD_FIELDS}
    line = json.dumps(said).ljust(_HEAD_BYTES - 1) + "\n"

    def raise_line(text: str) -> str | None:
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

    place.change_head(raise_line)


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


def _write_line(place: CheckpointStore, point: Point | LedgerEntry, *, begun: bool = False) -> None:
    key = signing_key()

    def make_line(last: str) -> str:
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

    place.append(make_line)


def _parse(read: Any) -> Point:
    if not isinstance(read, dict):
        raise ValueError("no checkpoint")
    sequence, digest = read.get("sequence"), read.get("digest")
    if not isinstance(sequence, int) or not isinstance(digest, str) or sequence < 1:
        raise ValueError("no checkpoint")
    return Point(sequence, digest, str(read.get("key_id", "")), str(read.get("signature", "")))


RESET = "checkpoints_reset"
# The first commits of a ledger may be noted by several processes before the first of them has made
# the file. So many entries after a beginning, a missing file is none that was not yet made.
BEGINNING = 64

Problem = tuple[str, int, str]


class CheckpointComparison:
    """`known` is the digest of every entry that a checkpoint tells of. `mark` is where a complete
    verification has ended, which tells of an entry too."""

    def __init__(self, public_keys: dict[str, str], mark: Mark | None = None) -> None:
        self.mark = mark
        self.is_kept = bool(where())
        self.history = history(public_keys)
        self.known = {point.sequence: point.digest for point in self.history.points}
        self.head: Point | None = None
        self.head_problem = ""
        try:
            self.head = head()
        except ValueError:
            self.head_problem = "head.json is damaged"
        else:
            if self.head and not is_signed(self.head, public_keys):
                self.head_problem = "no trusted key signed head.json"
            elif self.head is not None:
                self.known.setdefault(self.head.sequence, self.head.digest)
        self.reset_at = 0

    def read(self, stated: Mapping[str, Any]) -> None:
        """Take in what an authentic entry says of the checkpoints themselves."""
        if stated["kind"] == RESET:
            self.reset_at = stated["sequence"]

    def contradict(self, sequence: int, statement_digest: str) -> bool:
        """Whether another entry of this number was committed than the one of this digest."""
        known = {self.known.get(sequence), statement_digest}
        if self.mark is not None and self.mark.sequence == sequence:
            known.add(self.mark.digest)
        return len(known - {None}) > 1

    def problems(self, last: int) -> Iterator[Problem]:
        """What is wrong with the checkpoints of a ledger whose newest entry is `last`."""
        if not self.is_kept:
            return
        end = last + 1
        ends = [*self.known, *([self.mark.sequence] if self.mark is not None else [])]
        beyond = [sequence for sequence in ends if sequence > last]
        if beyond:
            yield (
                "truncated",
                end,
                f"the checkpoints know entries up to {max(beyond)}: the end was cut off, or an "
                "older copy of the database is in use",
            )
        for number in self.history.damaged:
            yield (
                "altered checkpoint",
                end,
                f"line {number} of the checkpoints was not written by this service, or does not "
                "follow the line before",
            )
        if self.head_problem:
            yield "altered checkpoint", end, self.head_problem
        elif self.head is None:
            yield (
                "missing checkpoint",
                last,
                f"there is no head.json in {where()}. If the folder was changed on "
                "purpose, run `manage.py checkpoint_ledger --reset REASON`",
            )
        yield from self._missing_lines(last)

    def _missing_lines(self, last: int) -> Iterator[Problem]:
        for number, sequence in self.history.begun.items():
            is_first = number == 1 and abs(sequence - self.reset_at) <= BEGINNING
            if not is_first:
                yield (
                    "missing checkpoint",
                    sequence,
                    "the checkpoints were gone when it was entered, and had not been reset",
                )
        points = self.history.points
        begin = max(self.reset_at, points[0].sequence if points else 0)
        for sequence in range(begin - begin % EVERY + EVERY, last - BEGINNING, EVERY):
            if sequence not in self.known:
                yield (
                    "missing checkpoint",
                    sequence,
                    "checkpoints.jsonl has no line for it, as for every thousandth entry",
                )
                return
