"""`manage.py rotate_keys`: encrypt everything stored under the first key of FERNET_KEYS."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from providers.checks import BEFORE_WORK
from providers.services import Rotation, encrypted_fields, rotate, rotate_elsewhere


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Re-encrypts every encrypted value with the first key in FERNET_KEYS. Put the new key "
        "first for every process, and restart the processes that read the keys from their "
        "environment. Run this command, then repeat it with --dry-run until nothing is left. Then "
        "remove the old key."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="Only count; change nothing.")
        parser.add_argument("--json", action="store_true", help="Print the summary as JSON.")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, help="The database to use.")

    def handle(self, *args: Any, **options: Any) -> None:
        rotations = [
            rotate(
                model,
                column,
                using=options["database"],
                dry_run=options["dry_run"],
                report=self._progress,
            )
            for model, column in encrypted_fields()
        ]
        rotations += rotate_elsewhere(dry_run=options["dry_run"])
        if options["json"]:
            summary = {
                "dry_run": options["dry_run"],
                "columns": [asdict(rotation) for rotation in rotations],
            }
            self.stdout.write(json.dumps(summary))
        else:
            for rotation in rotations:
                self.stdout.write(_line(rotation))
            if options["dry_run"]:
                self.stdout.write("This was a dry run: nothing was changed.")
        failed = [f"{entry.model} {key}" for entry in rotations for key in entry.failed]
        if failed:
            raise CommandError(
                f"No key in FERNET_KEYS decrypts {len(failed)} of the values: {', '.join(failed)}. "
                "Put the key that encrypted them back, after the first one."
            )

    def _progress(self, rotation: Rotation) -> None:
        self.stderr.write(_line(rotation))


def _line(rotation: Rotation) -> str:
    return (
        f"{rotation.model}.{rotation.column}: {rotation.rotated} rotated, "
        f"{rotation.current} already current, {len(rotation.failed)} failed"
    )
