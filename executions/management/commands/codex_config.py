from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from executions.doors.codex.connection import read_query
from executions.doors.codex.credentials import PATH, capability_of
from executions.tenants.models import ApiKey
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration

_SCHEMES = ("ws://", "wss://")
_OPTIONS = {
    "template": "a template of the tenant, as NAME or NAME@3",
    "language": "the language of the session's interpreter; the default is python",
    "network": "none, open, packages, or hosts with commas between",
    "folder": "the folder in which Codex is used: its commands have the workspace in its place",
    "idle_seconds": "how long an unused session stays awake; the default is 600",
}
_BLOCK = """\
default = "cofferdam"
include_local = false

[[environments]]
id = "cofferdam"
url = "{url}"
"""
_HEADER = """\
auth_bearer_token = "{token}"
"""


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
        for name, text in _OPTIONS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", default="", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        address = str(options["url"]).rstrip("/")
        if not address.startswith(_SCHEMES) or not address.isprintable() or '"' in address:
            raise CommandError("--url: Must begin with ws:// or wss://.")
        query = urlencode({name: options[name] for name in _OPTIONS if options[name]})
        try:
            read_query(query)
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        key = _key_of(options["tenant"], options["key"])
        token, tail = capability_of(key), f"?{query}" if query else ""
        if options["in_url"]:
            self.stdout.write(_BLOCK.format(url=f"{address}{PATH}{token}{tail}"), ending="")
            return
        self.stdout.write(_BLOCK.format(url=f"{address}{PATH}{tail}"), ending="")
        self.stdout.write(_HEADER.format(token=token), ending="")


def _key_of(tenant: str, name: str) -> ApiKey:
    keys = ApiKey.objects.select_related("tenant").filter(tenant__slug=tenant, name=name)
    now = timezone.now()
    found = [key for key in keys if key.is_valid(now)]
    if not found:
        raise CommandError(
            f"The tenant {tenant!r} has no valid API key {name!r}. Create it with create_api_key."
        )
    return found[-1]
