"""What the embedded default consists of: one SQLite file and DATA_DIR. Others are refused here."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from django.conf import settings

from executions.runs.models import Artifact, artifact_storage
from sandbox_site import bootstrap, keys
from sandbox_site.database import files_of

PAGE = "docs/deployment/backup.md"

# Of the running processes, and gone with them.
RUNTIME = "run"
# Which sandboxes a pool of this machine keeps, held locked by that pool.
KEPT = "kept"
# Root file systems of sandboxes, to be imported again.
IMAGES = "images"
# Requests that wait for a worker. They are not carried out after a restore.
QUEUED = "queue"
# Results that wait for the database, removed once they are in it.
JOURNAL = "journal"
SECRETS = (keys.FILE_NAME, bootstrap.CREDENTIALS)

# Between looks at how far the copy got.
_PAGES = 4096


class Refused(Exception):
    """It cannot be done here. The text says why, and what to do instead."""


def database_file() -> Path:
    """The SQLite file. Raises Refused where the database is a server."""
    files = files_of(settings.DATABASES)
    if not files:
        vendor = settings.DATABASES["default"]["ENGINE"].rpartition(".")[2]
        raise Refused(
            f"The database is {vendor}, and this command is for SQLite alone. Use the server's own "
            f"tools, such as pg_dump and pg_restore: {PAGE} has the commands and their order."
        )
    return files[0]


def artifacts_folder() -> Path:
    """Where artifacts are. Raises Refused where that is no folder of DATA_DIR."""
    place = Path(getattr(artifact_storage(), "location", ""))
    if not place.is_relative_to(settings.DATA_DIR):
        raise Refused(
            "Artifacts are not kept in DATA_DIR. Copy their storage with its own tools, after the "
            f"database: {PAGE} has the commands and their order."
        )
    return place


def checkpoints_folder() -> Path | None:
    """None where they are turned off. Those in the storage lie in DATA_DIR, as the artifacts do."""
    if settings.LEDGER_CHECKPOINTS == "storage":
        return Path(settings.DATA_DIR) / "ledger"
    return Path(settings.LEDGER_CHECKPOINTS) if settings.LEDGER_CHECKPOINTS else None


def copy_database(source: Path, target: Path, report: Callable[[int, int], None]) -> None:
    """Copy a database that others write to, as it is at one moment.

    One read transaction spans the copy: without it each write of another process would begin it
    anew. Writers are not held up. `report` is told pages left and pages in all. Raises
    sqlite3.Error, also for a copy whose structure is damaged.
    """
    with (
        closing(sqlite3.connect(_uri(source, "mode=rw"), uri=True, isolation_level=None)) as live,
        closing(sqlite3.connect(target)) as copy,
    ):
        live.execute("BEGIN")
        live.execute("SELECT count(*) FROM sqlite_master").fetchone()
        live.backup(copy, pages=_PAGES, progress=lambda _, left, pages: report(left, pages))
        live.execute("ROLLBACK")
    with closing(open_copy(target)) as read:
        found = read.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(f"the database is damaged: {found}")


def open_copy(path: Path) -> sqlite3.Connection:
    """A database that nobody writes to, read without making files beside it."""
    return sqlite3.connect(copy_uri(path), uri=True)


def copy_uri(path: Path) -> str:
    return _uri(path, "immutable=1")


def migrations_of(copy: sqlite3.Connection) -> set[tuple[str, str]]:
    """What was applied to a database, as (app, name)."""
    return set(copy.execute("SELECT app, name FROM django_migrations"))


def artifact_table() -> str:
    return str(Artifact._meta.db_table)


def _uri(path: Path, options: str) -> str:
    return f"file:{quote(str(path))}?{options}"
