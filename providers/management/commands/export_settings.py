from __future__ import annotations

import json
import os
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration
from providers.services.exchange import export_settings


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = "Write the providers' configuration in the format of import_settings."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--secrets",
            action="store_true",
            help="include the secrets; without this option they are masked",
        )
        parser.add_argument("--output", help="the new file, readable by its owner only")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            document = export_settings(with_secrets=options["secrets"])
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        text = json.dumps(document, indent=2, ensure_ascii=False)
        if not options["output"]:
            self.stdout.write(text)
            return
        try:
            descriptor = os.open(options["output"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise CommandError(f"{options['output']}: {error.strerror}") from None
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
