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
        "Write the SQLite database anew, without what is free in it. Once, for a database that "
        "was made before it could give space back by itself. Stop the service first."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if connection.vendor != "sqlite":
            raise CommandError("This database looks after its space itself.")
        freed = compact()
        self.stdout.write(f"{freed / 2**20:.1f} MiB freed")
