from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from sandbox_site import settings
from sandbox_site.settings_page import page, rows


class Command(BaseCommand):
    requires_system_checks = []
    help = (
        "List the settings: name, value, and whether it comes from the environment, from the "
        '.env file or from the default. Of a secret the list says only "set".'
    )

    def add_arguments(self, parser: CommandParser) -> None:
        group = parser.add_mutually_exclusive_group()
        group.add_argument(
            "--changed", action="store_true", help="list only those that differ from the default"
        )
        group.add_argument("--markdown", action="store_true", help="print docs/settings.md instead")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["markdown"]:
            self.stdout.write(page(), ending="")
            return
        shown = [row for row in rows(settings.env) if row.is_changed or not options["changed"]]
        name_width = max((len(row.name) for row in shown), default=0)
        value_width = max((len(row.value) for row in shown if len(row.value) <= 40), default=0)
        for row in shown:
            self.stdout.write(f"{row.name:{name_width}}  {row.value:{value_width}}  {row.source}")
