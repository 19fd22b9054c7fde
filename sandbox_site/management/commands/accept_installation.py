from __future__ import annotations

from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.ledger.entry import LedgerUnavailable
from sandbox_site import installation


class Command(BaseCommand):
    help = (
        "Accept this instance's key or directory as the right one for this database, because the "
        "former one is lost, or the files were moved or restored on purpose. The reason is entered "
        "in the ledger. Every other instance must then use the same."
    )
    # It is for an instance that does not fit.
    requires_system_checks = [Tags.security]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", choices=installation.NAMES)
        parser.add_argument("--reason", required=True, help="what happened to the former one")

    def handle(self, *args: Any, name: str, reason: str, **options: Any) -> None:
        try:
            installation.accept(name, reason)
        except (installation.DoesNotFit, LedgerUnavailable) as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{name} of this instance is the installation's from now on.")
