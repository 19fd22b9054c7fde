from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from executions.capabilities.retention.service import Erasure, apply_retention
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Erase code, output, artifacts and records that are older than the retention of their "
        "tenant. Their ledger entries stay, so the ledger still verifies. Data on legal hold is "
        "not erased. The workers do this every day."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="count, erase nothing")
        parser.add_argument("--json", action="store_true", help="print the summary as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        erased = apply_retention(dry_run=options["dry_run"], report=self._progress)
        if options["json"]:
            summary = {
                "dry_run": options["dry_run"],
                "erasures": [
                    {
                        **asdict(each),
                        "created_before": each.created_before.isoformat(),
                        "held": sorted(map(str, each.held.executions)),
                    }
                    for each in erased
                ],
            }
            self.stdout.write(json.dumps(summary))
            return
        for each in erased:
            self.stdout.write(_line(each))
        if options["dry_run"]:
            self.stdout.write("This was a dry run: nothing was erased.")
        elif not erased:
            self.stdout.write("Nothing had to be erased.")

    def _progress(self, erasure: Erasure) -> None:
        self.stderr.write(_line(erasure))


def _line(erasure: Erasure) -> str:
    return (
        f"{erasure.tenant}: {erasure.data} of {erasure.executions} executions before "
        f"{erasure.created_before:%Y-%m-%d %H:%M}, {erasure.bytes} bytes"
    )
