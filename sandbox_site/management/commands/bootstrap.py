"""Make the data directory ready to serve."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import Tags
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from executions.ledger.append import record_baseline
from executions.runs.worker import ensure_schedules
from providers.errors import InvalidConfiguration
from providers.services import two_person_rule
from providers.services.approvers import can_approve
from sandbox_site import bootstrap, installation
from sandbox_site.keys import KeysLost
from sandbox_site.private_files import tighten

_ALONE = (
    "TWO_PERSON_RULE is on, and fewer than two administrators count as separate people: requested "
    "changes wait until there are two. `manage.py createsuperuser` creates an administrator, and "
    "`manage.py confirm_account NAME` confirms that an account belongs to a separate person."
)


class Command(BaseCommand):
    help = (
        "Prepare the data directory: keys, tables, an administrator, a tenant with an API key, an "
        "active provider. Existing data is not changed."
    )
    # The checks refuse to go on without the keys that this command makes.
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            bootstrap.ensure_keys(settings.DATA_DIR)
        except KeysLost as error:
            raise CommandError(str(error)) from None
        tighten(settings.DATA_DIR)
        self.check(tags=[Tags.security])
        call_command("migrate", interactive=False, verbosity=0)
        try:
            installation.join()
        except installation.DoesNotFit as error:
            raise CommandError(str(error)) from None
        is_new = not bootstrap.has_accounts()
        found = record_baseline()
        created = bootstrap.ensure_accounts(settings.DATA_DIR)
        try:
            is_given = bootstrap.ensure_given_key()
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        try:
            advice = bootstrap.ensure_provider()
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        ensure_schedules()
        # Of a new installation they are the roles, which `migrate` has made.
        if found and not is_new:
            self.stdout.write(
                f"{found} existing records were not yet covered by the ledger and were entered as "
                "found."
            )
        if created:
            self.stdout.write("Created, and shown only this once:")
            for name, value in created.items():
                self.stdout.write(f"  {name}={value}")
            self.stdout.write(f"Kept in {settings.DATA_DIR / bootstrap.CREDENTIALS}")
        if is_given:
            self.stdout.write(
                f"SANDBOX_API_KEY is a key of the tenant {bootstrap.AGENT_SANDBOX} now. "
                "Former values of it are revoked."
            )
        if two_person_rule() and not can_approve():
            self.stdout.write(_ALONE)
        if advice:
            self.stdout.write(advice)
