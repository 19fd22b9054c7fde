from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from executions.capabilities.observability.counters import recount
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = "Count all executions anew for the dashboard. Prints how many were counted."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(str(recount()))
