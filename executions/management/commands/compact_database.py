"""Make a SQLite database as small as what it holds."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connection

from executions.services.compaction import compact
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Rewrite the SQLite database without its free pages. Needed once, for a database that was "
        "created before free space was returned automatically. Stop the service first."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if connection.vendor != "sqlite":
            raise CommandError("This database returns free space automatically.")
        freed = compact()
        self.stdout.write(f"{freed / 2**20:.1f} MiB freed")
