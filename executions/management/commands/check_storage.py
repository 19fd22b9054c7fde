from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.capabilities.retention.service import Comparison, Differences, compare_storage
from providers.checks import BEFORE_WORK

_TELL_EVERY = 10_000


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Compare the files of artifacts, queued requests and sessions with their rows, both ways. "
        "Exit code: 1 when a file or row has no counterpart, 2 when the storage cannot be read."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--remove",
            action="store_true",
            help="delete the files that no row names, which after a restored backup may be newer "
            "than the rows",
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            found = compare_storage(remove=options["remove"], report=self._progress)
        except OSError as error:
            raise CommandError(f"The storage cannot be read: {error}", returncode=2) from error
        if options["json"]:
            self.stdout.write(json.dumps({"is_same": found.is_same, **asdict(found)}))
        else:
            self.stdout.write(f"{found.files} files and {found.rows} rows compared.")
            self._tell("files that no row names", found.without_row)
            self._tell("rows whose files are gone", found.without_bytes)
            if found.removed:
                self.stdout.write(f"{found.removed} files removed.")
        if not found.is_same:
            sys.exit(1)

    def _progress(self, found: Comparison) -> None:
        if (found.files + found.rows) % _TELL_EVERY == 0:
            self.stderr.write(f"{found.files} files and {found.rows} rows compared")

    def _tell(self, what: str, found: Differences) -> None:
        if found.number:
            self.stdout.write(f"{found.number} {what}:")
        for name in found.names:
            self.stdout.write(f"  {name}")
