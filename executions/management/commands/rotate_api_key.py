from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from executions.tenants.keys import rotate
from executions.tenants.models import ApiKey
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration

_LONGEST_HOURS = 24 * 366


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Replace a key by a new one with the same scopes and restrictions, and print it, alone, "
        "on standard output. Both are valid for a while."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "prefix", help="the first characters of the key, as the admin shows them"
        )
        parser.add_argument(
            "--overlap-hours", type=float, default=24.0, help="how long the old key stays valid"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        found = list(ApiKey.objects.filter(prefix=options["prefix"], revoked_at=None)[:2])
        if len(found) != 1:
            number = "no valid key" if not found else "more than one key"
            raise CommandError(f"There is {number} that begins with {options['prefix']!r}.")
        hours = options["overlap_hours"]
        if not 0 <= hours <= _LONGEST_HOURS:
            raise CommandError(f"--overlap-hours must be 0 to {_LONGEST_HOURS}.")
        former = found[0]
        until = timezone.now() + timedelta(hours=hours)
        try:
            _, key_text = rotate(former, until, expires_at=former.expires_at)
        except InvalidConfiguration as error:
            raise CommandError(error.message) from error
        self.stdout.write(key_text)
