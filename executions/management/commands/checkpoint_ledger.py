from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.ledger import checkpoints
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable
from executions.ledger.verification import verify_entries
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Write a signed checkpoint of the ledger outside the database. The workers do it every "
        "hour. With --reset, accept the ledger as it is now, after a backup was restored on "
        "purpose: the old checkpoints are set aside and the reason is entered in the ledger."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--reset", metavar="REASON", help="why the ledger is at an earlier state"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not checkpoints.where():
            raise CommandError("LEDGER_CHECKPOINTS is empty, so no checkpoints are kept.")
        try:
            if options["reset"]:
                self._reset(options["reset"])
            written = checkpoints.write_checkpoint(verify_entries)
        except LedgerUnavailable as error:
            raise CommandError(error.message) from error
        if written:
            self.stdout.write(f"entry {written.sequence} {written.digest}")
        else:
            self.stdout.write("nothing new")

    def _reset(self, reason: str) -> None:
        known = checkpoints.head()
        for path in checkpoints.set_aside():
            self.stdout.write(f"kept as {path}")
        content = {
            "reason": reason,
            "was_at": known.sequence if known else None,
            "was_digest": known.digest if known else None,
        }
        append("checkpoints_reset", "ledger", content)
