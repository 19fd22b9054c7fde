from __future__ import annotations

import getpass
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.capabilities.reports.reading import Scope, entry_of, lines_of
from executions.capabilities.reports.service import Made, Pieces, make
from executions.capabilities.reports.signing import examined
from executions.kernel.text import uuid7
from executions.ledger.entry import LedgerUnavailable
from executions.ledger.trust import trusted_keys
from providers.errors import InvalidConfiguration

logger = logging.getLogger(__name__)

NOT_INTACT = 1
NOT_MADE = 2


class Command(BaseCommand):
    help = (
        "Make a signed report for an auditor, with executions and their ledger entries. Each "
        "report is entered in the ledger. Exit code: 0 when all records in it are intact, "
        f"{NOT_INTACT} when the report has findings, {NOT_MADE} when it could not be made. "
        "With --check it verifies that files are reports signed with this ledger's key: 0 when "
        f"all are, {NOT_INTACT} when one is not, {NOT_MADE} when a file could not be verified."
    )
    requires_system_checks = [Tags.security]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "file", nargs="+", help="where to write, ending with .json or .pdf; one or both"
        )
        parser.add_argument("--check", action="store_true", help="check these files instead")
        parser.add_argument("--tenant", default="", help="a tenant's slug")
        parser.add_argument("--since", type=_moment, metavar="DATE", help="ISO 8601, UTC if bare")
        parser.add_argument("--until", type=_moment, metavar="DATE")
        parser.add_argument(
            "--id",
            type=UUID,
            action="append",
            default=[],
            help="the id of an execution; may be repeated",
        )
        parser.add_argument("--code", action="store_true", help="include the code")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["check"]:
            self._check(options["file"])
            return
        paths = _by_format(options["file"])
        scope = Scope(
            options["tenant"],
            options["since"],
            options["until"],
            tuple(dict.fromkeys(options["id"])),
            options["code"],
        )
        try:
            scope.check()
            made = self._make(scope, paths)
        except InvalidConfiguration as error:
            raise CommandError(f"{error.field}: {error.message}", returncode=NOT_MADE) from None
        except LedgerUnavailable as error:
            raise CommandError(error.message, returncode=NOT_MADE) from None
        except OSError as error:
            told = f"{error.filename}: {error.strerror}"
            raise CommandError(told, returncode=NOT_MADE) from None
        except Exception as error:
            # Whatever else ends it with 1 would say that it was made.
            logger.exception("the report could not be made")
            told = f"The report could not be made: {type(error).__name__}; see the log."
            raise CommandError(told, returncode=NOT_MADE) from error
        self.stdout.write(
            f"{made.runs} runs, {made.findings} findings. Entry {made.ledger_sequence} of the "
            f"ledger; JSON {made.json_hash}, PDF {made.pdf_hash}."
        )
        if made.truncated:
            self.stdout.write(f"INCOMPLETE: there are more than {made.runs} runs.")
        if made.findings:
            sys.exit(NOT_INTACT)

    def _make(self, scope: Scope, paths: dict[str, str]) -> Made:
        """Nothing is left of a report that was not entered."""
        for path in paths.values():
            if os.path.lexists(path):
                raise FileExistsError(17, "already exists", path)
        drafts = {name: f"{path}.part" for name, path in paths.items()}

        def written(name: str) -> Any:
            return lambda pieces: _write(drafts.get(name), pieces)

        try:
            made = make(
                str(uuid7()), scope, _who(), written(".json"), written(".pdf"), self._progress
            )
            for name, path in paths.items():
                os.rename(drafts[name], path)
        finally:
            for draft in drafts.values():
                with suppress(FileNotFoundError):
                    os.unlink(draft)
        return made

    def _progress(self, progress: str) -> None:
        if self.stderr.isatty():
            self.stderr.write(progress)

    def _check(self, paths: list[str]) -> None:
        ill = False
        for path in paths:
            try:
                keys = trusted_keys()
                with open(path, "rb") as file:
                    signed = examined(file, keys)
            except LedgerUnavailable as error:
                raise CommandError(error.message, returncode=NOT_MADE) from None
            except OSError as error:
                raise CommandError(f"{path}: {error.strerror}", returncode=NOT_MADE) from None
            if isinstance(signed, str):
                ill = True
                told = [f"NOT VALID: {signed}"]
            elif entry := entry_of(signed, keys):
                told = ["valid", *lines_of(entry)]
            else:
                told = ["valid", "NOT ENTERED: the ledger has no entry of this report"]
            self.stdout.write("\n".join(f"{path}: {line}" for line in told))
        if ill:
            sys.exit(NOT_INTACT)


def _by_format(paths: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        ending = Path(path).suffix.lower()
        if ending not in (".json", ".pdf") or ending in found:
            raise CommandError(
                f"{path}: Name one file that ends with .json, one that ends with .pdf, or both.",
                returncode=NOT_MADE,
            )
        found[ending] = path
    return found


def _write(path: str | None, pieces: Pieces) -> None:
    if path is None:
        for _ in pieces:
            pass
        return
    with open(path, "xb", opener=_private) as stream:
        for piece in pieces:
            stream.write(piece)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _who() -> str:
    """The account of the machine, by the name that it has there."""
    with suppress(OSError, KeyError, ImportError):
        return f"command:{getpass.getuser()}"
    return "command"


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
