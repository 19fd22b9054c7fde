"""Where the ledger's checkpoints are: a folder, or a bucket that every host writes to."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from django.conf import settings

from executions.kernel.storage import LEDGER, Folder, file_store
from providers.threads import NoThreadLeft, start_thread

if TYPE_CHECKING:
    from executions.kernel.bucket import Bucket

logger = logging.getLogger(__name__)

_HEAD = "head.json"
_HISTORY = "checkpoints.jsonl"


class CheckpointStore(Protocol):
    """Two files, each changed by one at a time. Everything raises OSError where it fails."""

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

    def set_aside(self, stamp: str) -> list[str]:
        """Give both files another name. Where they went."""


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
        descriptor = self._locked(_HEAD, os.O_RDWR)
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
        descriptor = self._locked(_HISTORY, os.O_RDWR | os.O_APPEND)
        with os.fdopen(descriptor, "r+b", buffering=0) as stream:
            size = os.fstat(descriptor).st_size
            tail = os.pread(descriptor, 4096, max(0, size - 4096)).decode(errors="replace")
            stream.write(add(_last_line(tail)).encode())
            os.fsync(descriptor)

    def set_aside(self, stamp: str) -> list[str]:
        moved = []
        for name in (_HEAD, _HISTORY):
            if (self._folder / name).exists():
                target = self._folder / f"{name}.{stamp}"
                (self._folder / name).rename(target)
                moved.append(str(target))
        return moved

    def _locked(self, name: str, flags: int) -> int:
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
        def changed(found: bytes | None) -> bytes | None:
            text = change((found or b"").decode("ascii", errors="replace"))
            return None if text is None else text.encode("ascii")

        self._bucket.change(_HEAD, changed)

    def lines(self) -> Iterator[str]:
        found, _ = self._bucket.read(_HISTORY)
        yield from (found or b"").decode(errors="replace").splitlines(keepends=True)

    def append(self, add: Callable[[str], str]) -> None:
        def longer(found: bytes | None) -> bytes:
            before = found or b""
            return before + add(_last_line(before[-4096:].decode(errors="replace"))).encode()

        self._bucket.change(_HISTORY, longer)

    def set_aside(self, stamp: str) -> list[str]:
        names = (_HEAD, _HISTORY)
        return [f"{name}.{stamp}" for name in names if self._bucket.rename(name, f"{name}.{stamp}")]


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
