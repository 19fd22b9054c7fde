from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.ledger.append import accept, accept_removal
from executions.ledger.bindings import BINDINGS, model_of
from executions.ledger.entry import LedgerUnavailable
from executions.receivers import said_of
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Accept the current content of a row that was changed outside the service. The account of "
        "an accepted row can sign in again. The acceptance is entered in the ledger; the change "
        "stays a finding of verify_ledger."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", help="the model, as verify_ledger names it, such as auth.user")
        parser.add_argument("key", help="the number or id of the row, which follows the model")
        parser.add_argument("--reason", required=True, help="who changed it, and how that is known")

    def handle(self, *args: Any, **options: Any) -> None:
        label, key = options["model"].lower(), options["key"]
        model = model_of(label) if label in BINDINGS else None
        if model is None:
            raise CommandError(f"The ledger binds no rows of {label!r}.")
        try:
            row = model._base_manager.filter(pk=key).first()
            if row is None:
                entry = accept_removal(model, key, options["reason"])
            else:
                entry = accept(row, options["reason"], said_of(row))
        except (ValueError, ValidationError):
            row = entry = None
        except LedgerUnavailable as error:
            raise CommandError(error.message) from error
        if row is None and entry is None:
            raise CommandError(f"There is no row {key!r} of {label}.")
        if entry is None:
            self.stdout.write(f"{label} {key} matches its ledger entry.")
        else:
            how = "as it is" if row is not None else "as removed"
            self.stdout.write(f"entry {entry.sequence}: {label} {key} is accepted {how}")
