"""Files that every host needs, in a folder or a bucket, and the headers of downloads."""

from __future__ import annotations

import os
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast
from urllib.parse import quote

from django.conf import settings
from django.core.exceptions import SuspiciousFileOperation
from django.core.files.base import File
from django.core.files.storage import FileSystemStorage, storages

ARTIFACTS = "artifacts"
QUEUE = "queue"
LEDGER = "ledger"
WORKSPACES = "workspaces"
REPORTS = "reports"
# The kinds above are folders of it.
INSTALLATION = "installation"

# What SigV4 allows a link to last.
MOST_LINK_SECONDS = 7 * 24 * 3600
_PIECE_BYTES = 256 * 1024
_MOST_KEY_CHARACTERS = 200
_SEGMENT = "[a-z0-9][a-z0-9._-]*"
# No key is named so.
_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}")
_KEY = re.compile(f"{_SEGMENT}(/{_SEGMENT})*", re.ASCII)


def checked_key(name: str) -> str:
    """A name that means one file wherever it is kept, and one below its kind: lower case, ASCII,
    no segment that starts with a dot. Raises SuspiciousFileOperation for any other.

    File names of tenants are never such names: they are in rows, and the key is made of hashes.
    """
    if len(name) > _MOST_KEY_CHARACTERS or not _KEY.fullmatch(name):
        raise SuspiciousFileOperation("this is no key of the storage")
    return name


class Pieces:
    """The bytes of a part of a file, fetched as they are asked for. Iterating raises OSError.

    Whoever does not take all of them calls `close`; a response of Django does.
    """

    def __init__(
        self,
        read: Callable[[int], bytes] = lambda size: b"",
        close: Callable[[], object] = lambda: None,
        length: int | None = None,
    ) -> None:
        self._read = read
        self._left = length
        self.close = close

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        size = _PIECE_BYTES if self._left is None else min(_PIECE_BYTES, self._left)
        piece = self._read(size) if size else b""
        if not piece:
            self.close()
            raise StopIteration
        if self._left is not None:
            self._left -= len(piece)
        return piece


@dataclass(frozen=True)
class Entry:
    """A file, by its name below its kind; `modified` in seconds since 1970."""

    name: str
    size: int
    modified: float


class FileStore(Protocol):
    """What our kinds of storage have beside Django's methods."""

    # What moves it, for messages.
    setting: str

    def save(self, name: str, content: Any) -> str: ...
    def open(self, name: str, mode: str = "rb") -> IO[bytes]: ...
    def delete(self, name: str) -> None: ...
    def exists(self, name: str) -> bool: ...
    def size(self, name: str) -> int: ...

    def start(self, name: str, size: int) -> bytes:
        """The first bytes of a file, `size` of them at most. Raises OSError."""

    def entries(self) -> Iterator[Entry]:
        """Every file, in any order. Raises OSError."""

    def create(self, name: str, content: bytes) -> bytes:
        """Make the file unless it is there; what it says then. Of several at once one makes it."""

    def replace(self, name: str, content: bytes) -> None:
        """Write a file anew, whole or not at all. Raises OSError."""

    def save_stream(self, name: str, stream: Iterable[bytes]) -> int:
        """Write a file anew from pieces of any size; how many bytes they were.

        Takes little memory however many there are, and the file is seen when all of it is there.
        `name` is as `checked_key` wants it. Raises OSError, and whatever `stream` raises.
        """

    def open_range(self, name: str, offset: int = 0, length: int | None = None) -> Pieces:
        """The bytes from `offset` on, `length` at most, fewer where the file ends before.

        `name` is as `checked_key` wants it. Raises OSError, here and while they are taken.
        """

    def link(self, name: str, *, expires_in: int, filename: str, mime_type: str) -> str | None:
        """An address that downloads the file for `expires_in` seconds, whoever has it.

        None where the storage has no such addresses. `name` is as `checked_key` wants it;
        `filename` and `mime_type` may be anything. Raises ValueError for a time that is not 1 to
        MOST_LINK_SECONDS.
        """

    def discard_unfinished(self, before: float) -> int:
        """Remove what `save_stream`s that were cut off before that moment (seconds since 1970)
        left. How many they were. Raises OSError.
        """


def file_store(kind: str) -> FileStore:
    """The storage of one kind, as it is configured now."""
    return cast("FileStore", storages[kind])


class Folder(FileSystemStorage):
    """Of DATA_DIR or of a directory that is shared; the service's own user alone can read it."""

    def __init__(self, kind: str = "", root: str = "") -> None:
        super().__init__(file_permissions_mode=0o600, directory_permissions_mode=0o700)
        self._kind = kind
        self._root = root
        self.setting = "STORAGE_URL" if root else "DATA_DIR"

    # As it is now: where DATA_DIR is decides, and not where it was.
    @property
    def base_location(self) -> str:
        return str(Path(self._root or settings.DATA_DIR) / self._kind)

    @property
    def location(self) -> str:
        return os.path.abspath(self.base_location)

    def _save(self, name: str, content: File[Any]) -> str:
        try:
            return cast("str", super()._save(name, content))  # type: ignore[misc]
        except OSError:
            # Half of a file is nobody's.
            with suppress(OSError):
                self.delete(name)
            raise

    def start(self, name: str, size: int) -> bytes:
        with self.open(name) as stream:
            return cast("bytes", stream.read(size))

    def entries(self) -> Iterator[Entry]:
        for folder, _, names in os.walk(self.location):
            for name in names:
                path = Path(folder) / name
                with suppress(FileNotFoundError):
                    found = path.lstat()
                    yield Entry(str(path.relative_to(self.location)), found.st_size, found.st_mtime)

    def create(self, name: str, content: bytes) -> bytes:
        path = Path(self.path(name))
        with self._draft(path, [content]) as (draft, _), suppress(FileExistsError):
            os.link(draft, path)
        return path.read_bytes()

    def replace(self, name: str, content: bytes) -> None:
        path = Path(self.path(name))
        with self._draft(path, [content]) as (draft, _):
            draft.replace(path)

    def save_stream(self, name: str, stream: Iterable[bytes]) -> int:
        path = Path(self.path(checked_key(name)))
        with self._draft(path, stream) as (draft, size):
            draft.replace(path)
        return size

    def open_range(self, name: str, offset: int = 0, length: int | None = None) -> Pieces:
        stream = open(self.path(checked_key(name)), "rb")  # noqa: SIM115
        stream.seek(offset)
        return Pieces(stream.read, stream.close, length)

    def link(self, name: str, *, expires_in: int, filename: str, mime_type: str) -> None:
        checked_key(name)

    def discard_unfinished(self, before: float) -> int:
        found = 0
        for entry in self.entries():
            if entry.modified < before and _DRAFT.fullmatch(entry.name.rpartition("/")[2]):
                self.delete(entry.name)
                found += 1
        return found

    @contextmanager
    def _draft(self, path: Path, pieces: Iterable[bytes]) -> Iterator[tuple[Path, int]]:
        """A whole file beside `path`, and its size. What is not moved away is removed.

        Its bytes are on the disk by then: a row that outlives a power cut may name it. The folder
        is not written out as well, which would cost as much again.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            size = 0
            with os.fdopen(descriptor, "wb") as stream:
                for piece in pieces:
                    size += stream.write(piece)
                stream.flush()
                os.fsync(descriptor)
            yield draft, size
        finally:
            draft.unlink(missing_ok=True)


_MOST_CHARACTERS = 150
# Other than letters of every script: what a header, a shell or a file manager reads as its own.
_UNSAFE = re.compile(
    r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\ud800-\udfff<>:"/\\|?*%;\u202a-\u202e\u2066-\u2069]'
)
_NOT_ASCII = re.compile(r"[^ -~]")
# Nothing of these is a program to a browser, wherever it is shown.
_SAFE_TYPES = frozenset(
    {
        "application/gzip",
        "application/json",
        "application/octet-stream",
        "application/zip",
        "image/gif",
        "image/jpeg",
        "image/png",
        "image/webp",
        "text/csv",
        "text/plain",
    }
)

# Nothing in it can act, whatever a browser takes it for, and no cache keeps it.
INERT = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cache-Control": "private, no-store",
}


def clean_filename(path: str) -> str:
    """The last part of a path as a name that a file may have on every system."""
    name = unicodedata.normalize("NFC", path.rstrip("/").rpartition("/")[2])
    # The end of a long name says more than its start, and no name starts with a dot.
    name = _UNSAFE.sub("_", name).strip(" .")[-_MOST_CHARACTERS:].strip(" .")
    return name or "file"


def disposition(path: str) -> str:
    """The Content-Disposition that saves a file under its cleaned name (RFC 6266, RFC 5987)."""
    name = clean_filename(path)
    plain = _NOT_ASCII.sub("_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


def safe_type(mime_type: str) -> str:
    """`mime_type` where it cannot be a program, and bytes for any other."""
    return mime_type if mime_type in _SAFE_TYPES else "application/octet-stream"
