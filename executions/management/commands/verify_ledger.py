from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.ledger.entry import LedgerUnavailable
from executions.ledger.models import Finding, Verification
from executions.ledger.verification import check_receipt, verify

NOT_INTACT = 1
NOT_VERIFIED = 2

_TELL_EVERY = 10_000


class Command(BaseCommand):
    help = (
        "Read the whole ledger and compare it with its signatures, its checkpoints and the "
        f"records. Ends with 0 when it is intact, {NOT_INTACT} when it is not, naming the first "
        f"entry concerned, {NOT_VERIFIED} when it could not be verified."
    )

    # Also for an instance whose keys do not fit the ledger.
    requires_system_checks = [Tags.security]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.add_argument(
            "--ledger-only",
            action="store_true",
            help="do not compare executions and other rows with their entries",
        )
        parser.add_argument(
            "--skip-artifacts",
            action="store_true",
            help="do not read the files of artifacts to compare their bytes",
        )
        parser.add_argument(
            "--receipt",
            action="append",
            default=[],
            metavar="FILE",
            help="a receipt, or a response with one, that the ledger must match",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            contradicted = [_contradicted(path) for path in options["receipt"]]
            found = verify(
                records=not options["ledger_only"],
                artifact_bytes=not options["skip_artifacts"],
                report=self._progress,
            )
        except LedgerUnavailable as error:
            raise CommandError(error.message, returncode=NOT_VERIFIED) from error
        found.findings += [finding for finding in contradicted if finding]
        found.findings.sort(key=lambda finding: finding.sequence)
        if options["json"]:
            outcome = {"intact": found.is_intact, **asdict(found)}
            self.stdout.write(json.dumps(outcome))
        else:
            self._print(found)
        if not found.is_intact:
            sys.exit(NOT_INTACT)

    def _progress(self, found: Verification) -> None:
        if found.entries % _TELL_EVERY == 0:
            self.stderr.write(f"{found.entries} entries read, {len(found.findings)} findings")

    def _print(self, found: Verification) -> None:
        if found.is_intact:
            self.stdout.write(
                f"Intact: {found.entries} entries, {found.executions} executions, "
                f"{found.rows} other rows, {found.checkpoints} checkpoints."
            )
            if found.unproven:
                self.stdout.write(
                    f"NOT PROVEN: {found.unproven} rows were never entered. After an upgrade, run "
                    "`manage.py bootstrap` once, which enters them as they are then."
                )
            return
        self.stdout.write(f"NOT INTACT, first at {found.findings[0]}")
        for finding in found.findings[1:100]:
            self.stdout.write(f"  then {finding}")
        number = len(found.findings) + found.omitted
        self.stdout.write(f"{number} findings in {found.entries} entries.")


def _contradicted(path: str) -> Finding | None:
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        return check_receipt(read.get("receipt", read))
    except (OSError, ValueError, AttributeError) as error:
        raise CommandError(f"{path}: {error}", returncode=NOT_VERIFIED) from error
