"""The file of a backup: a tar whose last member lists every other one with its SHA-256.

    database.sqlite3    a copy as of one moment
    checkpoints/...     the folder LEDGER_CHECKPOINTS
    data/...            what else belongs to it of DATA_DIR
    manifest.jsonl      a line about the backup, then one line for each file

Plain tar, so that it can be looked into without this program, and written and read as a stream, so
that it can be piped through whatever encrypts or compresses. Memory does not grow with its size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

FORMAT = 1
DATABASE = "database.sqlite3"
CHECKPOINTS = "checkpoints"
DATA = "data"
MANIFEST = "manifest.jsonl"

_PIECE = 1024 * 1024
_PART = re.compile(r"(?!\.{1,2}$)[^/\0]+")


class DamagedArchive(Exception):
    """It is no backup of ours, or not whole any more. The text says what is wrong."""


@dataclass(frozen=True)
class Listed:
    """A file of the archive, as the manifest has it."""

    name: str
    size: int
    sha256: str


class _Hashed:
    """A stream whose bytes are counted into a hash while they are read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self._stream.read(size)
        self.sha256.update(piece)
        return piece


class ArchiveWriter:
    """Adds files one after the other, and lists them in a small database meanwhile."""

    def __init__(self, stream: IO[bytes], folder: Path) -> None:
        """`folder` is for what is kept until the end."""
        self._folder = folder
        self._tar = tarfile.open(fileobj=stream, mode="w|")  # noqa: SIM115  ended by `finish`
        self.listed = sqlite3.connect(folder / "list.sqlite3", isolation_level=None)
        self.listed.execute("PRAGMA journal_mode=OFF")
        self.listed.execute("PRAGMA synchronous=OFF")
        self.listed.execute("CREATE TABLE file (name TEXT PRIMARY KEY, size INT, sha256 TEXT)")
        self.files = 0
        self.bytes = 0

    def add(self, name: str, source: Path) -> bool:
        """Add a regular file. False when it is gone, or is no regular file."""
        try:
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            if not source.is_file() or source.is_symlink():
                return False
            raise
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return False
            # Files that are written in place are written under this lock.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._write(name, os.fstat(descriptor).st_size, int(found.st_mtime), stream)
        return True

    def finish(self, about: dict[str, Any]) -> None:
        """Write the manifest, and with it the end."""
        about = {"format": FORMAT, **about, "files": self.files, "bytes": self.bytes}
        with tempfile.TemporaryFile(dir=self._folder) as manifest:
            manifest.write(_line(about))
            for name, size, sha256 in self.listed.execute("SELECT * FROM file ORDER BY name"):
                manifest.write(_line({"name": name, "size": size, "sha256": sha256}))
            length = manifest.tell()
            manifest.seek(0)
            self._tar.addfile(_header(MANIFEST, length, 0), manifest)
        self._tar.close()
        self.listed.close()

    def _write(self, name: str, size: int, modified: int, stream: IO[bytes]) -> None:
        counted = _Hashed(stream)
        self._tar.addfile(_header(name, size, modified), counted)
        # tarfile would remember each of what may be a million files.
        self._tar.members.clear()  # type: ignore[attr-defined]
        row = (name, size, counted.sha256.hexdigest())
        self.listed.execute("INSERT INTO file VALUES (?, ?, ?)", row)
        self.files += 1
        self.bytes += size


def unpack(
    stream: IO[bytes], target: Path, report: Callable[[int, int], None] = lambda files, size: None
) -> dict[str, Any]:
    """Write an archive's files below `target`, an empty folder, and compare them with its list.

    Returns the manifest's first line. Raises DamagedArchive. Nothing is written elsewhere, whatever
    the archive names: names are checked, and anything but a regular file is refused.
    """
    files = size = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]
                _write_member(tar, member, target)
                if member.name == MANIFEST:
                    break
                files, size = files + 1, size + member.size
                report(files, size)
    except tarfile.TarError as error:
        raise DamagedArchive(f"it is not a complete tar archive: {error}") from error
    if not (target / MANIFEST).exists():
        raise DamagedArchive(f"it ends before its {MANIFEST}")
    return _compare(target, files)


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    parts = member.name.split("/")
    known = member.name in (DATABASE, MANIFEST) or parts[0] in (CHECKPOINTS, DATA)
    if not known or not all(map(_PART.fullmatch, parts)) or not member.isreg():
        raise DamagedArchive(f"{member.name!r} does not belong in a backup")
    content = tar.extractfile(member)
    place = target.joinpath(*parts)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except (FileExistsError, NotADirectoryError):
        raise DamagedArchive(f"{member.name!r} occurs twice") from None
    with os.fdopen(descriptor, "wb") as written:
        while content is not None and (piece := content.read(_PIECE)):
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())


def _compare(target: Path, unpacked: int) -> dict[str, Any]:
    with (target / MANIFEST).open(encoding="utf-8") as lines:
        try:
            about: dict[str, Any] = json.loads(next(lines))
            known = about.get("format")
        except (StopIteration, ValueError, AttributeError) as error:
            raise DamagedArchive(f"its {MANIFEST} cannot be read") from error
        if known != FORMAT:
            raise DamagedArchive(f"its format is {known!r}, and this version reads {FORMAT}")
        listed = 0
        for entry in map(_parse, lines):
            listed += 1
            if _hash(target / entry.name) != (entry.size, entry.sha256):
                raise DamagedArchive(f"{entry.name!r} does not match the manifest")
    if not listed == unpacked == about.get("files"):
        raise DamagedArchive(
            f"it holds {unpacked} files, its manifest lists {listed} of {about.get('files')}"
        )
    (target / MANIFEST).unlink()
    return about


def _parse(line: str) -> Listed:
    try:
        entry = Listed(**json.loads(line))
        sound = all(map(_PART.fullmatch, entry.name.split("/")))
    except (TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise DamagedArchive(f"a line of its {MANIFEST} cannot be read")
    return entry


def _hash(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise DamagedArchive(f"{path.name!r} is listed but missing: {error.strerror}") from None
    return size, digest.hexdigest()


def files_below(folder: Path, left_out: Callable[[Path], bool]) -> Iterator[Path]:
    """Every file below a folder, without what is left out and without links."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = Path(entry.path)
        if left_out(path) or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from files_below(path, left_out)
        else:
            yield path


def _header(name: str, size: int, modified: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mtime, header.mode = size, modified, 0o600
    return header


def _line(content: dict[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()
