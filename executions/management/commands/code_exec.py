from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.doors.bridge import (
    NOT_RUN,
    REFUSED,
    Answers,
    Bridge,
    Serving,
    TooLong,
    exit_code_of,
    read_arguments,
    read_frame,
    take_standard_streams,
    too_long,
    unrun,
    whole_of,
)
from executions.runs import active_runs
from providers import draining
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration
from providers.threads import start_thread


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "The bridge for programs in other languages: run code as the API does, and print the "
        "result as one line of JSON. Without arguments the request is a JSON object on standard "
        "input: code, and optionally language, timeout, arguments, entrypoint, files. Standard "
        "output has only responses; logs go to standard error. Exit code: 0 when the response "
        f"has the result of the code, {REFUSED} when the request was "
        f"refused, {NOT_RUN} when it could not be run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "request",
            nargs="*",
            metavar="CODE LANGUAGE TIMEOUT ARGUMENTS",
            help="the request as four arguments, of which TIMEOUT (seconds) and ARGUMENTS (a JSON "
            "object) may be empty. Others of this machine can read them: prefer standard input. "
            "Code that begins with - needs -- before it",
        )
        parser.add_argument(
            "--serve",
            action="store_true",
            help="keep running: each line of standard input is a request, each line of standard "
            "output a response with the same id",
        )
        parser.add_argument(
            "--artifacts",
            type=Path,
            metavar="FOLDER",
            help="write large artifacts to files in this directory, for the caller to remove; the "
            "response has their path instead of content_b64",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        request = options["request"]
        if request and (options["serve"] or len(request) != 4):
            problem = (
                "Give all four of CODE LANGUAGE TIMEOUT ARGUMENTS, or none; --serve takes none."
            )
            raise CommandError(problem, returncode=REFUSED)
        folder = options["artifacts"]
        bridge = Bridge(folder.absolute() if folder else None)
        try:
            bridge.check()
            requests, answers = take_standard_streams()
        except InvalidConfiguration as error:
            raise CommandError(error.message, returncode=REFUSED) from error
        except OSError as error:
            problem = f"Standard input and output must be open: {error.strerror}."
            raise CommandError(problem, returncode=REFUSED) from error
        if options["serve"]:
            _serve(bridge, requests, answers)
            return
        answer = _answer(bridge, request, requests)
        try:
            Answers(answers).write(answer)
        except OSError as error:
            problem = f"The answer could not be written: {error.strerror}."
            raise CommandError(problem, returncode=NOT_RUN) from error
        raise SystemExit(exit_code_of(answer))


def _answer(bridge: Bridge, arguments: list[str], requests: int) -> dict[str, Any]:
    name = None
    try:
        if arguments:
            body = read_arguments(*arguments)
        else:
            frame = read_frame(whole_of(requests, settings.SANDBOX_MAX_BODY_BYTES))
            name, body = frame.id, dict(frame.body)
    except TooLong:
        return unrun(too_long())
    except InvalidConfiguration as error:
        return unrun(error)
    answer = bridge.call(body)
    return answer if name is None else {"id": name, **answer}


def _serve(bridge: Bridge, requests: int, answers: int) -> None:
    serving = Serving(bridge, requests, answers)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: serving.stop())
    start_thread("warm", bridge.warm)
    serving.run(_end_all)
    active_runs.shutdown()


def _end_all() -> None:
    draining.refuse_new()
    active_runs.end_all(draining.ENDING_SECONDS)
