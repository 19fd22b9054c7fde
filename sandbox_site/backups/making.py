"""Writing a backup while the service goes on.

The order makes it consistent. What changes in place or is removed as the database goes on (the
checkpoints, the journal) is copied first, so that it never knows more than the database. Then the
database is copied as of one moment. What it names was written before its row and never changes, so
that is copied last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from django.conf import settings

from executions.ledger.models import LedgerEntry
from sandbox_site import keys
from sandbox_site.backups.archive import CHECKPOINTS, DATA, DATABASE, ArchiveWriter, files_below
from sandbox_site.backups.embedded import (
    IMAGES,
    JOURNAL,
    KEPT,
    QUEUED,
    RUNTIME,
    SECRETS,
    Refused,
    artifact_table,
    artifacts_folder,
    checkpoints_folder,
    copy_database,
    copy_uri,
    database_file,
    migrations_of,
    open_copy,
)
from sandbox_site.database import files_of

_MEBIBYTE = 1024 * 1024
_TELL_EVERY = 1000
_NAMED = 20

Tell = Callable[[str], None]


@dataclass
class Made:
    """What was written. `sequence` and `digest` are the ledger's newest entry in it."""

    files: int = 0
    bytes: int = 0
    sequence: int = 0
    digest: str = ""
    secrets: list[str] = field(default_factory=list)
    # Keys that the environment brings, which are therefore not in it.
    keys_elsewhere: list[str] = field(default_factory=list)
    # Files of artifacts that the database names and that were not there.
    missing: int = 0
    first_missing: list[str] = field(default_factory=list)


def write_file(target: Path, *, secrets: bool, tell: Tell) -> Made:
    """Write a backup to a new file, 0600 from its first byte; it has its name when it is whole.

    Raises Refused, and OSError or sqlite3.Error when it could not be written. Nothing is left then.
    """
    database_file()
    if target.exists() or target.is_symlink():
        raise Refused(f"{target} already exists. Name another file.")
    folder = target.resolve().parent
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder.")
    if folder.is_relative_to(settings.DATA_DIR):
        raise Refused("The backup would lie in DATA_DIR itself. Name a file elsewhere.")
    _refuse_without_room(folder)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            made = write(stream, secrets=secrets, tell=tell)
            stream.flush()
            os.fsync(stream.fileno())
        # Unlike a rename this takes nobody's place.
        os.link(draft, target)
    finally:
        draft.unlink()
    return made


def write(stream: IO[bytes], *, secrets: bool, tell: Tell) -> Made:
    """Write a backup into a stream. Raises as `write_file` does."""
    source, artifacts = database_file(), artifacts_folder()
    if not source.exists():
        raise Refused(f"There is no database at {source}, so there is nothing to back up.")
    with _workplace(source) as work:
        archive = ArchiveWriter(stream, work)
        made = Made()
        if (place := checkpoints_folder()) is not None:
            _add_folder(archive, place, CHECKPOINTS, _nothing, tell)
        _add_folder(archive, settings.DATA_DIR / JOURNAL, f"{DATA}/{JOURNAL}", _nothing, tell)
        copy = work / "copy.sqlite3"
        made_at = datetime.now(UTC)
        copy_database(source, copy, lambda left, pages: _tell_pages(tell, left, pages))
        archive.add(DATABASE, copy)
        _add_folder(archive, settings.DATA_DIR, DATA, _left_out(secrets), tell)
        names = {name for (name,) in archive.listed.execute("SELECT name FROM file")} & {
            f"{DATA}/{name}" for name in SECRETS
        }
        made.secrets = sorted(name.removeprefix(f"{DATA}/") for name in names)
        made.keys_elsewhere = _keys_elsewhere()
        with closing(open_copy(copy)) as read:
            migrations = sorted(migrations_of(read))
            made.sequence, made.digest = read.execute(
                f"SELECT sequence, digest FROM {LedgerEntry._meta.db_table} "  # noqa: S608
                "ORDER BY sequence DESC LIMIT 1"
            ).fetchone() or (0, "")
        _look_for_artifacts(archive, copy, artifacts, made)
        made.files, made.bytes = archive.files, archive.bytes
        archive.finish(
            {
                "made_at": made_at.isoformat(),
                "ledger": {"sequence": made.sequence, "digest": made.digest},
                "secrets": made.secrets,
                "missing": made.missing,
                "migrations": migrations,
            }
        )
    return made


@contextmanager
def _workplace(source: Path) -> Iterator[Path]:
    """A private folder in DATA_DIR, for one backup at a time. What a killed one left is removed."""
    runtime = settings.DATA_DIR / RUNTIME
    runtime.mkdir(mode=0o700, exist_ok=True)
    needed = sum(path.stat().st_size for path in files_of(settings.DATABASES) if path.exists())
    free = shutil.disk_usage(runtime).free
    if free < needed + settings.DISK_RESERVE_MIB * _MEBIBYTE:
        raise Refused(
            f"The copy of {source} needs {needed // _MEBIBYTE} MiB in DATA_DIR in addition to "
            f"DISK_RESERVE_MIB, and {free // _MEBIBYTE} MiB are free."
        )
    with (runtime / "backup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("Another backup is being made.") from None
        work = runtime / "backup"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            shutil.rmtree(work)


def _refuse_without_room(folder: Path) -> None:
    """A backup that fills the service's own disk would do the harm it is made against."""
    places = [settings.DATA_DIR, *filter(None, [checkpoints_folder()])]
    needed = 0
    for place in places:
        for path in files_below(place, _is_of_this_machine):
            with suppress(FileNotFoundError):
                needed += path.stat().st_size
    reserve = settings.DISK_RESERVE_MIB * _MEBIBYTE
    if os.stat(folder).st_dev == os.stat(settings.DATA_DIR).st_dev:
        # The copy of the database lies there as well for a while.
        needed += database_file().stat().st_size + reserve
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refused(
            f"About {needed // _MEBIBYTE} MiB are needed in {folder}, and {free // _MEBIBYTE} MiB "
            "are free."
        )


def _is_of_this_machine(path: Path) -> bool:
    return path.name in (RUNTIME, KEPT, QUEUED) or path == settings.DATA_DIR / IMAGES


def _left_out(secrets: bool) -> Callable[[Path], bool]:
    named = {settings.DATA_DIR / name for name in (RUNTIME, KEPT, QUEUED, JOURNAL, IMAGES)}
    named |= set(files_of(settings.DATABASES))
    if (place := checkpoints_folder()) is not None:
        named.add(place)
    if not secrets:
        named |= {settings.DATA_DIR / name for name in SECRETS}
    drafts = tuple(f".{name}" for name in SECRETS)
    return lambda path: path in named or path.name.startswith(drafts)


def _nothing(_: Path) -> bool:
    return False


def _add_folder(
    archive: ArchiveWriter, folder: Path, name: str, left_out: Callable[[Path], bool], tell: Tell
) -> None:
    for path in files_below(folder, left_out):
        archive.add(f"{name}/{path.relative_to(folder)}", path)
        if archive.files % _TELL_EVERY == 0:
            tell(f"{archive.files} files, {archive.bytes // _MEBIBYTE} MiB")


def _tell_pages(tell: Tell, left: int, pages: int) -> None:
    tell(f"database: {pages - left} of {pages} pages")


def _keys_elsewhere() -> list[str]:
    generated = keys.read(settings.DATA_DIR)
    held = {
        "SECRET_KEY": settings.SECRET_KEY,
        "FERNET_KEYS": ",".join(settings.FERNET_KEYS),
        "LEDGER_KEYS": ",".join(settings.LEDGER_KEYS),
    }
    return [name for name in keys.NAMES if held[name] != generated.get(name, "")]


def _look_for_artifacts(archive: ArchiveWriter, copy: Path, folder: Path, made: Made) -> None:
    """Whether every file of an artifact that the copied database names is in the archive."""
    prefix = f"{DATA}/{folder.relative_to(settings.DATA_DIR)}/"
    archive.listed.execute("ATTACH ? AS copy", [copy_uri(copy)])
    absent: Any = archive.listed.execute(
        f"SELECT file FROM copy.{artifact_table()} WHERE file != '' "  # noqa: S608
        "AND NOT EXISTS (SELECT 1 FROM main.file WHERE name = ? || file) ORDER BY file",
        [prefix],
    )
    for (name,) in absent:
        made.missing += 1
        if made.missing <= _NAMED:
            made.first_missing.append(name)
    archive.listed.execute("DETACH copy")
