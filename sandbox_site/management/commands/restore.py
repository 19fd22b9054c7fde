from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from sandbox_site.backups.archive import DamagedArchive
from sandbox_site.backups.embedded import PAGE, Refused
from sandbox_site.backups.restoring import Restored, restore

NOT_INTACT = 1
NOT_RESTORED = 2


class Command(BaseCommand):
    help = (
        "Restore a backup into an empty DATA_DIR, compare every file with the manifest, verify the "
        f"ledger and end open executions. Exit code: 0 when the ledger is intact, {NOT_INTACT} "
        f"when it is not, {NOT_RESTORED} when nothing was restored."
    )
    # There are no keys yet.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("source", metavar="SOURCE", help="a backup, or - for standard input")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with _opened(options["source"]) as stream:
                restored = restore(stream, self.stderr.write)
        except DamagedArchive as error:
            raise CommandError(
                f"Nothing was restored. The backup is damaged: {error}.", returncode=NOT_RESTORED
            ) from error
        except (Refused, OSError, sqlite3.Error) as error:
            raise CommandError(f"Nothing was restored. {error}", returncode=NOT_RESTORED) from error
        found = restored.verification
        intact = found is not None and found.is_intact
        if options["json"]:
            ledger = None if found is None else found.outcome()
            about = {key: restored.about.get(key) for key in ("made_at", "ledger", "secrets")}
            outcome = {"intact": intact, "backup": about, "verification": ledger}
            self.stdout.write(json.dumps(outcome | restored.settled._asdict()))
        else:
            self._print(restored)
        if not intact:
            sys.exit(NOT_INTACT)

    def _print(self, restored: Restored) -> None:
        tell, found, settled = self.stdout.write, restored.verification, restored.settled
        tell(f"Restored into {settings.DATA_DIR}: the backup of {restored.about['made_at']}.")
        if found is None:
            tell(f"NOT VERIFIED: {restored.not_verified}")
        elif found.is_intact:
            tell(f"The ledger is intact: {found.entries} entries, {found.executions} executions.")
        else:
            tell(f"THE LEDGER IS NOT INTACT, first at {found.findings[0]}")
        if restored.kept_checkpoints:
            tell(
                f"{settings.LEDGER_CHECKPOINTS} had checkpoints, and they were kept: `truncated` "
                "says how many entries the backup does not have."
            )
        if settled.ended:
            tell(
                f"{settled.ended} executions that were queued or running at the time of the backup "
                "were ended with SB009. They do not run again, because they may have run after it."
            )
        if settled.paused:
            tell(
                f"{settled.paused} schedules that have become due since were paused, because they "
                "may have run. Their tenants can resume them."
            )
        if restored.not_ended:
            tell(
                f"OPEN EXECUTIONS COULD NOT BE ENDED: {restored.not_ended} The service does not "
                "start, because they would run again. Fix the cause, move the folder away and "
                "restore again."
            )
        tell(
            f"Next ({PAGE}):\n"
            "  1. Revoke again what was revoked since: keys, accounts and roles are as they were.\n"
            "  2. manage.py checkpoint_ledger --reset 'why': the ledger then records the restore.\n"
            "  3. manage.py verify_ledger --receipt FILE, for receipts that were given out since.\n"
            "  4. manage.py bootstrap, then start the service."
        )


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    if source == "-":
        yield sys.stdin.buffer
        return
    with Path(source).open("rb") as stream:
        yield stream
