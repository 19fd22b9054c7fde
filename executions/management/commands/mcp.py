from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.runs.requests import Caller
from executions.tenants import keys
from executions.tenants.models import Tenant
from executions.tenants.service import ensure_active
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration

ADDRESS = "127.0.0.1"


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Serve MCP over standard input and output, for one client on this machine, which starts "
        "it. Its tools run code as those of /mcp do, with the same records."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        who = parser.add_mutually_exclusive_group(required=True)
        who.add_argument(
            "--key-file",
            help="a file with an API key: the client has the key's tenant, scopes and restrictions",
        )
        who.add_argument(
            "--tenant", help="a tenant's slug: the client may do all that a key of the tenant can"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        caller = _of_key(options["key_file"]) if options["key_file"] else _of(options["tenant"])
        # The SDK takes half a second to be imported, which no other command needs.
        from executions.doors.mcp.server import serve

        try:
            asyncio.run(serve(caller))
        except KeyboardInterrupt:
            return


def _of_key(name: str) -> Caller:
    try:
        text = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{name}: cannot be read: {error}") from error
    try:
        key = keys.authenticate(text, ADDRESS)
    except keys.Unauthenticated:
        raise CommandError(f"{name}: the API key in it is not valid.") from None
    return Caller.of_key(key, request_id=f"mcp:stdio:{os.getpid()}", client_address=ADDRESS)


def _of(slug: str) -> Caller:
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        raise CommandError(f"There is no tenant {slug!r}. Create it with create_tenant.")
    try:
        ensure_active(tenant)
    except InvalidConfiguration as error:
        raise CommandError(error.message) from None
    return Caller(tenant, request_id=f"mcp:stdio:{os.getpid()}")
