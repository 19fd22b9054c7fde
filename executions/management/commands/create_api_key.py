from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from executions.runs.routing import check_languages, check_providers
from executions.tenants.keys import OF_E2B, OURS, create_api_key
from executions.tenants.models import USUAL_SCOPES, Scope, Tenant, as_words
from providers import isolation
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration

_LONGEST_DAYS = 36_500
_OPTIONS = {
    "languages": "language",
    "providers": "provider",
    "templates": "template",
    "addresses": "address",
}


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = "Create an API key and print it, alone, on standard output. It is shown only once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="the tenant's slug")
        parser.add_argument("--name", required=True, help="what the key is for")
        parser.add_argument(
            "--scope",
            action="append",
            choices=Scope.values,
            help=f"may be repeated; by default {USUAL_SCOPES}. admin is for /api/admin/sandbox",
        )
        for name, option in _OPTIONS.items():
            parser.add_argument(
                f"--{option}",
                dest=name,
                action="append",
                default=[],
                help="restrict the key to this; may be repeated",
            )
        parser.add_argument(
            "--minimum-isolation",
            choices=isolation.LEVELS,
            default="",
            help="restrict the key to this",
        )
        parser.add_argument(
            "--e2b", action="store_true", help="in the format that older E2B clients require"
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
        scopes = as_words(options["scope"]) if options["scope"] else USUAL_SCOPES
        bounds = {name: as_words(options[name]) for name in _OPTIONS}
        try:
            check_languages(bounds["languages"])
            check_providers(bounds["providers"])
            _, key_text = create_api_key(
                tenant,
                options["name"],
                expires_at,
                scopes,
                OF_E2B if options["e2b"] else OURS,
                minimum_isolation=options["minimum_isolation"],
                **bounds,
            )
        except InvalidConfiguration as error:
            raise CommandError(error.message) from error
        self.stdout.write(key_text)
