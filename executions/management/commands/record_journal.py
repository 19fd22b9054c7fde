from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from executions.runs.journal import leftover_files, put_back, record_waiting, waiting_files
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = "Record the runs whose results wait in the journal. The service does this automatically."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--all",
            action="store_true",
            help="Also try files that were set aside, such as after a lost key is back.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["all"]:
            put_back()
        recorded = record_waiting()
        self.stdout.write(
            f"{recorded} recorded, {len(waiting_files())} waiting, "
            f"{len(leftover_files())} set aside"
        )
