from __future__ import annotations

from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.ledger.entry import LedgerUnavailable
from executions.ledger.trust import adopt_key


class Command(BaseCommand):
    help = (
        "Let the first key of LEDGER_KEYS continue a ledger whose own key is lost. The entry says "
        "so, and the key must stay in LEDGER_KEYS for the ledger to verify. Not needed for a "
        "rotation: keep the old key in LEDGER_KEYS, after the new one."
    )

    # Also for an instance whose keys do not fit the ledger.
    requires_system_checks = [Tags.security]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--reason", required=True, help="what happened to the old key")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            entry = adopt_key(options["reason"])
        except LedgerUnavailable as error:
            raise CommandError(error.message) from error
        if entry is None:
            self.stdout.write("The ledger is signed with a key that LEDGER_KEYS holds.")
        else:
            self.stdout.write(f"entry {entry.sequence}: the key {entry.key_id} signs from here on")
