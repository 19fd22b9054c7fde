from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Max

from executions.kernel.ordered_work import processors
from executions.ledger.entry import LedgerUnavailable
from executions.ledger.models import Finding, LedgerEntry, Verification
from executions.ledger.progress import Progress
from executions.ledger.verification import check_receipt, verify

NOT_INTACT = 1
NOT_VERIFIED = 2

# Characters of a line of progress on a terminal.
_LINE = 100

_WHY_ALL = (
    "there is no active mark of a complete verification, or the entries before it are not those "
    "that were verified."
)
_NOT_CHECKED = (
    "NOT CHECKED again: of those of executions the signatures, the sequence, the records and the "
    "artifacts. Checked: of which execution each is, all other entries, and what the last one "
    "states"
)


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
        parser.add_argument(
            "--since-verified",
            action="store_true",
            help="read only the entries after the last complete verification of this installation "
            "that found nothing; the result names what was not checked",
        )
        parser.add_argument(
            "--processes",
            type=_number_of_processes,
            default=processors(),
            metavar="N",
            help="processes that read entries; by default as many as there are processors",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            contradicted = [_contradicted(path) for path in options["receipt"]]
            found = verify(
                records=not options["ledger_only"],
                artifact_bytes=not options["skip_artifacts"],
                processes=options["processes"],
                since_verified=options["since_verified"],
                keeps_mark=not any(contradicted),
                report=self._progress(),
            )
            if self.stderr.isatty():
                self.stderr.write(" " * _LINE, ending="\r")
        except LedgerUnavailable as error:
            raise CommandError(error.message, returncode=NOT_VERIFIED) from error
        except BrokenProcessPool as error:
            message = "A process that read entries was killed. Run it with --processes 1."
            raise CommandError(message, returncode=NOT_VERIFIED) from error
        found.findings += [finding for finding in contradicted if finding]
        found.findings.sort(key=lambda finding: finding.sequence)
        if options["json"]:
            self.stdout.write(json.dumps(found.outcome()))
        else:
            self._print(found, options)
        if not found.is_intact:
            sys.exit(NOT_INTACT)

    def _progress(self) -> Progress:
        newest = LedgerEntry.objects.aggregate(newest=Max("sequence"))["newest"] or 0
        is_terminal = self.stderr.isatty()

        def write(line: str) -> None:
            # On a terminal, over the line before.
            text, ending = (f"{line:<{_LINE}}", "\r") if is_terminal else (line, "\n")
            self.stderr.write(text, style_func=str, ending=ending)

        return Progress(newest, write, is_terminal=is_terminal)

    def _print(self, found: Verification, options: Mapping[str, Any]) -> None:
        tell = self.stdout.write
        if options["since_verified"] and found.mark is None:
            tell("All entries were read: " + _WHY_ALL)
        since = "" if found.mark is None else f" from entry {found.mark.sequence + 1} on"
        if found.is_intact:
            tell(
                f"Intact{since}: {found.entries} entries, {found.executions} executions, "
                f"{found.rows} other rows, {found.checkpoints} checkpoints."
            )
        else:
            tell(f"NOT INTACT, first at {found.findings[0]}")
            for finding in found.findings[1:100]:
                tell(f"  then {finding}")
            number = len(found.findings) + found.omitted
            tell(f"{number} findings in {found.entries} entries{since}.")
        if found.mark is not None:
            rows = "" if options["ledger_only"] else ", and the present state of all other rows"
            tell(
                f"Entries 1 to {found.mark.sequence} were verified at {found.mark.at} by a "
                f"complete verification. {_NOT_CHECKED}{rows}."
            )
        if found.is_intact and found.unproven:
            tell(
                f"NOT PROVEN: {found.unproven} rows were never entered. After an upgrade, run "
                "`manage.py bootstrap` once, which enters them as they are then."
            )


def _number_of_processes(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError("must be 1 or more")
    return number


def _contradicted(path: str) -> Finding | None:
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        return check_receipt(read.get("receipt", read))
    except (OSError, ValueError, AttributeError) as error:
        raise CommandError(f"{path}: {error}", returncode=NOT_VERIFIED) from error
