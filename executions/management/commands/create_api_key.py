from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from executions.models import ApiKey, Tenant
from executions.services.keys import create_api_key
from providers.errors import InvalidConfiguration

_LONGEST_DAYS = 36_500


class Command(BaseCommand):
    help = "Create an API key and print it, alone, on standard output. It is shown only once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="the tenant's slug")
        parser.add_argument("--name", required=True, help="what the key is for")
        parser.add_argument(
            "--scope",
            choices=ApiKey.Scope.values,
            default=ApiKey.Scope.EXECUTE,
            help="admin also opens /api/admin/sandbox",
        )
        parser.add_argument("--expires-in-days", type=int, help="never by default")

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = Tenant.objects.filter(slug=options["tenant"]).first()
        if tenant is None:
            raise CommandError(
                f"There is no tenant {options['tenant']!r}. Create it with create_tenant."
            )
        days = options["expires_in_days"]
        if days is not None and not 1 <= days <= _LONGEST_DAYS:
            raise CommandError(f"--expires-in-days must be 1 to {_LONGEST_DAYS}.")
        expires_at = None if days is None else timezone.now() + timedelta(days=days)
        try:
            _, key_text = create_api_key(tenant, options["name"], expires_at, options["scope"])
        except InvalidConfiguration as error:
            raise CommandError(error.message) from error
        self.stdout.write(key_text)
