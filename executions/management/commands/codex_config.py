from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from executions.doors.codex.configuration import OPTIONS, environment_block
from executions.doors.codex.credentials import capability_of
from executions.tenants.models import ApiKey
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Print the block for Codex's environments.toml, by which its commands run here. Its token "
        "allows what the API key allows, and is valid as long as the key is: keep it as you keep "
        "the key."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True, help="a tenant's slug")
        parser.add_argument("--key", required=True, help="the name of an API key of the tenant")
        parser.add_argument(
            "--url",
            default=f"ws://127.0.0.1:{settings.PORT}",
            help="where Codex reaches the service, such as wss://cofferdam.example.org",
        )
        parser.add_argument(
            "--in-url",
            action="store_true",
            help="put the token into the URL, for clients that send no header; proxies may log it",
        )
        for name, text in OPTIONS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", default="", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        token = capability_of(_key_of(options["tenant"], options["key"]))
        try:
            block = environment_block(options["url"], token, options, in_url=options["in_url"])
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        self.stdout.write(block, ending="")


def _key_of(tenant: str, name: str) -> ApiKey:
    keys = ApiKey.objects.select_related("tenant").filter(tenant__slug=tenant, name=name)
    now = timezone.now()
    found = [key for key in keys if key.is_valid(now)]
    if not found:
        raise CommandError(
            f"The tenant {tenant!r} has no valid API key {name!r}. Create it with create_api_key."
        )
    return found[-1]
