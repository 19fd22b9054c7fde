"""The warm pools of agent-sandbox that the launcher `kubernetes` accepts."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.errors import SandboxError
from providers.runtime.service import kubernetes_template


class Command(BaseCommand):
    help = kubernetes_template.HELP
    # It uses neither the database nor a key.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        kubernetes_template.add_arguments(parser, settings)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            kubernetes_template.run(settings, options, self.stdout.write)
        except SandboxError as error:
            raise CommandError(error.message) from None
