"""The code, arguments and input files of commands that run code, and the output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from cofferdam import Event, Execution, RunStream
from cofferdam.cli import output
from cofferdam.cli.exits import exit_code_of

RAW = "do not escape control characters on a terminal"
_LANGUAGES = {".js": "javascript", ".mjs": "javascript", ".py": "python", ".sh": "bash"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="file with the code; - or none: standard input")
    parser.add_argument("-c", "--code", help="the code, as text")
    parser.add_argument(
        *("-a", "--argument"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument for main(): a JSON value or plain text; repeatable",
    )
    parser.add_argument(
        "--arguments", metavar="JSON", help="arguments for main(), as a JSON object"
    )
    parser.add_argument(
        *("-e", "--env"),
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of the code; without VALUE, your own one; repeatable",
    )
    parser.add_argument(
        *("-f", "--file"),
        action="append",
        default=[],
        dest="files",
        metavar="[NAME=]PATH",
        help="copy a file into the sandbox, as NAME; repeatable",
    )
    parser.add_argument(
        "-t", "--timeout", type=float, metavar="SECONDS", help="time limit in seconds"
    )
    parser.add_argument(
        "--idempotency-key", metavar="KEY", help="requests with the same key run the code once"
    )
    parser.add_argument(
        "--artifacts", type=Path, metavar="FOLDER", help="save the files of artifacts/ in FOLDER"
    )
    parser.add_argument("--raw", action="store_true", help=RAW)
    parser.add_argument(
        "--json", action="store_true", help="print only the record, when the run has ended"
    )


def add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="RULE",
        help="host that the code may reach, such as pypi.org or *.example.com:443; repeatable",
    )


def network_of(options: argparse.Namespace) -> dict[str, Any]:
    """The option `network`, if hosts are named."""
    return {"network": {"allow": options.allow}} if options.allow else {}


def code_of(options: argparse.Namespace) -> str:
    """Raises ValueError, OSError."""
    if options.code is not None:
        if options.file is not None:
            raise ValueError("Give a file or -c, not both.")
        return str(options.code)
    if options.file in (None, "-"):
        return sys.stdin.read()
    return Path(options.file).read_text(encoding="utf-8")


def language_of(options: argparse.Namespace) -> str | None:
    """The language of the option or of the file extension; None for the service's default."""
    if options.language:
        return str(options.language)
    return _LANGUAGES.get(Path(options.file or "").suffix)


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError, OSError."""
    found: dict[str, Any] = {}
    if options.arguments is not None or options.argument:
        found["arguments"] = _arguments(options)
    if options.env:
        found["env"] = dict(map(_variable, options.env))
    if options.files:
        found["files"] = dict(map(_file, options.files))
    if options.timeout is not None:
        found["timeout"] = options.timeout
    if options.idempotency_key:
        found["idempotency_key"] = options.idempotency_key
    return found


def told(
    stream: RunStream, options: argparse.Namespace, *, with_results: bool = False
) -> Execution:
    """Print the output of a run while it runs, and return the execution when it has ended.

    With results, print the values of a cell too, as an interpreter does.
    """
    out = output.Out(raw=options.raw)
    with stream as events:
        for event in events:
            if options.json:
                continue
            if with_results and event.type == "output":
                out.value(event.data)
            else:
                _tell(out, event)
        execution = events.until_done()
    if options.json:
        output.as_json(execution.raw)
        return execution
    if with_results and execution.has_result:
        out.value({"text/plain": json.dumps(execution.result)})
    _tell_problems(execution)
    return execution


def told_record(execution: Execution, options: argparse.Namespace) -> int:
    """Print the recorded output of a run, and return its exit code."""
    if options.json:
        output.as_json(execution.raw)
    else:
        out = output.Out(raw=options.raw)
        out.stdout(execution.stdout.encode())
        out.stderr(execution.stderr.encode())
        _tell_problems(execution)
    return exit_code_of(execution)


def _tell_problems(execution: Execution) -> None:
    """Print the files and outputs that were left out, the advice, and the error."""
    for each in (*execution.artifacts_skipped, *execution.outputs_skipped):
        output.problem(f"{each.name} was left out: {each.reason}" if each.name else each.reason)
    for line in execution.advice:
        output.problem(f"Advice: {line}")
    if execution.error is not None:
        output.problem(f"{execution.error.code}: {execution.error.message}")


def _tell(out: output.Out, event: Event) -> None:
    if event.type == "stdout":
        out.stdout(event.content)
    elif event.type == "stderr":
        out.stderr(event.content)


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    found = json.loads(options.arguments) if options.arguments is not None else {}
    if not isinstance(found, dict):
        raise ValueError("--arguments: Must be a JSON object.")
    for each in options.argument:
        name, equals, text = each.partition("=")
        if not name or not equals:
            raise ValueError(f"--argument: {each!r} is not NAME=VALUE.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _variable(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not equals:
        if name not in os.environ:
            raise ValueError(f"--env: {name!r} is not set.")
        value = os.environ[name]
    return name, value


def _file(given: str) -> tuple[str, bytes]:
    name, equals, path = given.partition("=")
    if not equals or Path(given).exists():
        name, path = Path(given).name, given
    return name, Path(path).read_bytes()
