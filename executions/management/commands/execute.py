from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.doors.native.rendering import execution_detail
from executions.kernel.text import from_json
from executions.runs.models import Execution
from executions.runs.requests import API_ENTRYPOINTS, Caller, ExecutionRequest
from executions.runs.service import execute_sync
from executions.tenants.service import internal_tenant
from providers.checks import BEFORE_WORK
from providers.errors import SandboxError
from providers.slices import json_text

SERVICE_ERROR = 125
ENDED_BY_US = 124


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Run a file with the active provider, recorded like any execution. Ends with the code's "
        f"own exit code, {ENDED_BY_US} when the code was ended for its time or memory, "
        f"{SERVICE_ERROR} when it could not be run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", help="the code; - is standard input")
        parser.add_argument("--language", default="python")
        parser.add_argument("--arguments", help="a JSON object that main() is called with")
        parser.add_argument("--entrypoint", default="auto", choices=API_ENTRYPOINTS)
        parser.add_argument("--timeout", type=float, help="seconds")
        parser.add_argument("--json", action="store_true", help="print all details as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            request = ExecutionRequest(
                _read(options["file"]),
                language=options["language"],
                arguments=_arguments(options["arguments"]),
                entrypoint=options["entrypoint"],
                timeout=options["timeout"],
            )
            execution = execute_sync(request, Caller(internal_tenant())).execution
        except SandboxError as error:
            raise CommandError(
                f"{error.code}: {error.message}", returncode=SERVICE_ERROR
            ) from error
        if options["json"]:
            self.stdout.write(json_text(execution_detail(execution)))
        else:
            self._print(execution)
        sys.exit(_exit_code(execution))

    def _print(self, execution: Execution) -> None:
        """Both streams as they came, then the result of `main` on standard output."""
        self.stdout.write(execution.stdout, ending="")
        self.stderr.write(execution.stderr, ending="")
        if execution.has_result:
            self.stdout.write(execution.result)
        if execution.error_code:
            self.stderr.write(f"{execution.error_code}: {execution.error_message}")


def _read(name: str) -> str:
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return content.decode()
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}", returncode=SERVICE_ERROR) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{name}: is not UTF-8 text", returncode=SERVICE_ERROR) from error


def _arguments(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return from_json(text)
    except ValueError as error:
        raise CommandError(
            f"--arguments must be a JSON object: {error}", returncode=SERVICE_ERROR
        ) from error


def _exit_code(execution: Execution) -> int:
    if execution.status == Execution.Status.ERROR:
        return SERVICE_ERROR
    return ENDED_BY_US if execution.exit_code is None else execution.exit_code
