"""Putting a backup back, into an empty place and nowhere else."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management import call_command
from django.db.migrations.loader import MigrationLoader

from executions.ledger.entry import LedgerUnavailable
from executions.ledger.models import Verification
from executions.ledger.verification import verify
from executions.runs.orphaned_runs import Settled, close_after_restore
from sandbox_site import bootstrap, keys
from sandbox_site.backups.archive import CHECKPOINTS, DATA, DATABASE, DamagedArchive, unpack
from sandbox_site.backups.embedded import (
    IMAGES,
    KEPT,
    RUNTIME,
    Refused,
    artifacts_folder,
    checkpoints_folder,
    database_file,
    migrations_of,
    open_copy,
)
from sandbox_site.checks import secret_key
from sandbox_site.database import files_of
from sandbox_site.installation import RESTORING

# A disk of its own has this from the beginning.
_OF_THE_DISK = "lost+found"

Tell = Callable[[str], None]


@dataclass
class Restored:
    """What is there now. `verification` is None where the ledger could not be verified."""

    about: dict[str, Any]
    verification: Verification | None = None
    not_verified: str = ""
    settled: Settled = field(default_factory=Settled)
    # Why executions that were open could not be ended.
    not_ended: str = ""
    kept_checkpoints: bool = False
    unneeded_keys: list[str] = field(default_factory=list)


def restore(stream: IO[bytes], tell: Tell) -> Restored:
    """Put an archive's files into place, verify the ledger, end what the backup left open.

    Raises Refused and archive.DamagedArchive, and OSError when it could not be written: then
    nothing was put into place.
    """
    database = database_file()
    artifacts_folder()
    refuse_unless_empty(database)
    draft = settings.DATA_DIR / RESTORING
    draft.mkdir(mode=0o700, parents=True)
    try:
        about = unpack(stream, draft, lambda files, size: _tell(tell, files, size))
        _refuse_unless_usable(draft)
    except BaseException:
        shutil.rmtree(draft)
        raise
    restored = Restored(about)
    tell("All files match the manifest. Moving them into place.")
    restored.kept_checkpoints = _put_into_place(draft, database)
    bootstrap.ensure_keys(settings.DATA_DIR)
    call_command("migrate", interactive=False, verbosity=0)
    tell("Verifying the ledger.")
    _verify(restored)
    if not restored.not_ended:
        shutil.rmtree(draft)
    return restored


def refuse_unless_empty(database: Path) -> None:
    """Raise Refused where there is something that could be overwritten, or a service at work."""
    found = sorted(path.name for path in _entries(settings.DATA_DIR))
    if found:
        raise Refused(
            f"{settings.DATA_DIR} is not empty: {', '.join(found[:5])}. Stop the service and move "
            "the folder away. Keep it until you no longer need the data that the backup does not "
            "have."
        )
    if database.exists():
        raise Refused(f"{database} already exists. Stop the service and move it away.")
    if address := _listening():
        raise Refused(
            f"A process listens on {address}. Stop the service first: it would overwrite the "
            "restored data. If the process is another service, set PORT to the port of this one."
        )


def _entries(folder: Path) -> list[Path]:
    if not folder.exists():
        return []
    return [path for path in folder.iterdir() if path.name != _OF_THE_DISK]


def _listening() -> str:
    host = "127.0.0.1" if settings.HOST in ("0.0.0.0", "::") else settings.HOST  # noqa: S104
    try:
        socket.create_connection((host, settings.PORT), timeout=1).close()
    except OSError:
        return ""
    return f"{host} port {settings.PORT}"


def _refuse_unless_usable(draft: Path) -> None:
    """Before anything is in place: is it all there, and does this version know its database?"""
    if not (draft / DATABASE).exists():
        raise DamagedArchive(f"it has no {DATABASE}")
    ours = {RUNTIME, KEPT, IMAGES, RESTORING, *(path.name for path in files_of(settings.DATABASES))}
    if found := sorted(ours & {path.name for path in _entries(draft / DATA)}):
        raise DamagedArchive(f"{found[0]!r} does not belong in a backup")
    generated = keys.read(draft / DATA)
    given = {
        "SECRET_KEY": secret_key(),
        "FERNET_KEYS": settings.FERNET_KEYS,
        "LEDGER_KEYS": settings.LEDGER_KEYS,
    }
    lacking = [name for name in keys.NAMES if not given[name] and not generated.get(name)]
    if lacking or (settings.PRODUCTION and not all(given.values())):
        raise Refused(
            f"The backup does not hold {', '.join(lacking)}. Set them to their values at the time "
            "of the backup; without them encrypted data cannot be read."
        )
    with closing(open_copy(draft / DATABASE)) as copy:
        applied = migrations_of(copy)
    known = set(MigrationLoader(None).disk_migrations)
    if unknown := sorted(applied - known):
        raise Refused(
            "The backup was made by a newer version: this one does not know "
            f"{'.'.join(unknown[0])}. Restore it with the version that made it."
        )


def _put_into_place(draft: Path, database: Path) -> bool:
    """Whether checkpoints that were there already were kept.

    The database goes first and the keys last, and the draft stays until nothing is left open (see
    `installation.join`): what an interruption leaves does not start.
    """
    kept = _place_checkpoints(draft / CHECKPOINTS)
    database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.move(draft / DATABASE, database)
    entries = _entries(draft / DATA)
    for path in sorted(entries, key=lambda path: path.name == keys.FILE_NAME):
        os.rename(path, settings.DATA_DIR / path.name)
    return kept


def _place_checkpoints(source: Path) -> bool:
    place = checkpoints_folder()
    if place is None or not source.is_dir():
        return False
    if _entries(place):
        # They know what the ledger had after the backup.
        return True
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in source.iterdir():
        shutil.move(path, place / path.name)
    return False


def _verify(restored: Restored) -> None:
    try:
        restored.verification = verify()
    except LedgerUnavailable as error:
        restored.not_verified = error.message
    try:
        restored.settled = close_after_restore(str(restored.about.get("made_at", "")))
    except LedgerUnavailable as error:
        restored.not_ended = error.message


def _tell(tell: Tell, files: int, size: int) -> None:
    if files % 1000 == 0:
        tell(f"{files} files, {size // (1024 * 1024)} MiB")
