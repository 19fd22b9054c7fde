from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network.credentials import find_credential, put_credential, revoke
from executions.capabilities.network.sources import fetch_value
from providers.checks import BEFORE_WORK
from providers.credentials import MOST_CHARACTERS


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Add a network credential, give one another value, or revoke one. The value is read from a "
        "file, from standard input or from Vault. It is never printed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="code has the placeholder cfd-secret:NAME")
        parser.add_argument("--tenant", default="", help="slug; the installation by default")
        parser.add_argument(
            "--placement",
            help="bearer, basic, header, query or claude; a new one is bearer by default",
        )
        parser.add_argument("--field", help="the header, query parameter, user name or environment")
        parser.add_argument(
            "--rule",
            dest="rules",
            action="append",
            help="https:// rule of requests that get the value; may be repeated",
        )
        parser.add_argument("--variable", help="the variable that has the placeholder")
        parser.add_argument("--upstream", help="the service that http://NAME.sandbox leads to")
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "--from-file", type=Path, help="the file with the value; standard input by default"
        )
        what.add_argument(
            "--from-vault",
            metavar="MOUNT/PATH#KEY",
            help="where Vault has the value; each later value is fetched within about a minute",
        )
        what.add_argument("--revoke", action="store_true", help="erase the value, for good")

    @sensitive_variables()
    def handle(self, *args: Any, **options: Any) -> None:
        name, tenant = options["name"], options["tenant"]
        if options["revoke"]:
            credential = find_credential(name, tenant)
            if credential is None or not revoke(credential):
                raise CommandError(f"There is no active credential {name!r}.")
            self.stdout.write(f"{credential} is revoked.")
            return
        columns = {
            column: options[column]
            for column in ("placement", "field", "variable", "upstream")
            if options[column] is not None
        }
        if options["rules"]:
            columns["rules"] = "\n".join(options["rules"])
        # A value that is given here takes the place of a source.
        source = columns["source"] = options["from_vault"] or ""
        try:
            value = fetch_value(source) if source else _value(options["from_file"])
            credential = put_credential(name, value, tenant_slug=tenant, **columns)
        except ValidationError as error:
            raise CommandError(_told(error)) from None
        self.stdout.write(f"{credential} is active with version {credential.version}.")


def _told(error: ValidationError) -> str:
    said = error.message_dict.items()
    return " ".join(
        " ".join(lines) if name == NON_FIELD_ERRORS else f"{name}: {' '.join(lines)}"
        for name, lines in said
    )


def _value(path: Path | None) -> str:
    """Without the end of its last line. Raises CommandError."""
    if path is None and sys.stdin.isatty():
        return getpass("Value: ")
    try:
        with path.open("rb") if path else sys.stdin.buffer as file:
            found = file.read(MOST_CHARACTERS + 3)
        return found.decode("ascii").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise CommandError(f"--from-file: {error.strerror}: {path}") from None
    except UnicodeDecodeError:
        raise CommandError("The value must be printable ASCII.") from None
