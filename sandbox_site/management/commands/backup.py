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
        "Write database, keys, artifacts and checkpoints into one file, while the service goes on. "
        "For the SQLite default. Ends with 0 when it is whole, "
        f"{NOT_WHOLE} when files of artifacts were missing, {NOT_WRITTEN} when nothing was written."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("target", metavar="TARGET", help="a new file, or - for standard output")
        parser.add_argument(
            "--without-secrets",
            action="store_true",
            help="leave out the generated keys and credentials, which are then kept apart",
        )
        parser.add_argument("--json", action="store_true", help="print the outcome as JSON")

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
                f"IT HOLDS SECRETS IN CLEAR: {', '.join(made.secrets)}. Whoever reads it can "
                f"decrypt what is stored and sign in the ledger's name. Encrypt it: {PAGE}."
            )
        if made.keys_elsewhere:
            tell(
                f"NOT IN IT: {', '.join(made.keys_elsewhere)}, which the environment brings. Keep "
                "a copy of them elsewhere; without them it cannot be restored."
            )
        if made.missing:
            tell(
                f"NOT WHOLE: {made.missing} files of artifacts were not there, such as "
                f"{made.first_missing[0]}. They were erased meanwhile, or lost before: make "
                "another, and if it says the same run `manage.py verify_ledger`."
            )
