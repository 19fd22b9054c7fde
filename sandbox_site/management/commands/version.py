from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from sandbox_site import __version__


class Command(BaseCommand):
    requires_system_checks = []
    help = "Print the version of this service."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(__version__)
