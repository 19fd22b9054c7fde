from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.tenants.service import create_tenant
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = "Create a tenant, which API keys and executions belong to."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("slug", help="lower case letters, digits, hyphens and underscores")
        parser.add_argument("--name", default="", help="shown in the admin; the slug by default")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            tenant = create_tenant(options["slug"], options["name"])
        except InvalidConfiguration as error:
            raise CommandError(error.message) from error
        self.stderr.write(f"Tenant {tenant.slug} created.")
