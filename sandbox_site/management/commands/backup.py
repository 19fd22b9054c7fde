from __future__ import annotations

import json
import os
import sqlite3
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.checks import BEFORE_WORK
from sandbox_site.backups.embedded import PAGE, Refused
from sandbox_site.backups.making import Made, write, write_file

NOT_WHOLE = 1
NOT_WRITTEN = 2


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Write database, keys, artifacts and checkpoints to one file, while the service runs. For "
        f"SQLite, the default. Exit code: 0 when the backup is complete, {NOT_WHOLE} when files of "
        f"artifacts were missing, {NOT_WRITTEN} when nothing was written."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("target", metavar="TARGET", help="a new file, or - for standard output")
        parser.add_argument(
            "--without-secrets",
            action="store_true",
            help="leave out the generated keys and credentials; store them separately",
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        target, secrets = options["target"], not options["without_secrets"]
        try:
            if target == "-":
                made = self._write_stdout(secrets)
            else:
                made = write_file(Path(target), secrets=secrets, tell=self.stderr.write)
        except (Refused, OSError, sqlite3.Error) as error:
            raise CommandError(f"Nothing was backed up. {error}", returncode=NOT_WRITTEN) from error
        if options["json"]:
            # Standard output may be the backup itself.
            out = self.stderr if target == "-" else self.stdout
            out.write(json.dumps({"whole": not made.missing, **asdict(made)}))
        else:
            self._print(made, target)
        if made.missing:
            sys.exit(NOT_WHOLE)

    def _write_stdout(self, secrets: bool) -> Made:
        if sys.stdout.isatty():
            raise Refused("Standard output is a terminal. Name a file, or pipe it somewhere.")
        with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as stream:
            return write(stream, secrets=secrets, tell=self.stderr.write)

    def _print(self, made: Made, target: str) -> None:
        tell = self.stderr.write
        tell(
            f"{target}: {made.files} files, {made.bytes} bytes, "
            f"the ledger up to entry {made.sequence} {made.digest}"
        )
        if made.secrets:
            tell(
                f"IT CONTAINS UNENCRYPTED SECRETS: {', '.join(made.secrets)}. A reader of this "
                f"file can decrypt the stored data and sign ledger entries. Encrypt it: {PAGE}."
            )
        if made.keys_elsewhere:
            tell(
                f"NOT INCLUDED: {', '.join(made.keys_elsewhere)}, which are set in the "
                "environment. Keep a copy of them elsewhere; without them the backup cannot be "
                "restored."
            )
        if made.missing:
            tell(
                f"INCOMPLETE: {made.missing} files of artifacts were missing, such as "
                f"{made.first_missing[0]}. They were erased meanwhile, or lost before. Make "
                "another backup; if files are missing again, run `manage.py verify_ledger`."
            )
