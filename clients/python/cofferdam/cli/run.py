"""`cofferdam run` and `cofferdam logs`."""

from __future__ import annotations

import argparse

from cofferdam import Cofferdam
from cofferdam.cli import code, exits, output
from cofferdam.cli.parser import Commands


def add_run(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run code in a sandbox of its own",
        description="Run code in a sandbox of its own. Its output comes while it runs, and Ctrl-C "
        "cancels it.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    code.add_arguments(parser)
    parser.add_argument("-l", "--language", help="else by the file's name, else python")
    parser.add_argument(
        "--detach", action="store_true", help="print its id and leave it to run; see `logs`"
    )
    parser.set_defaults(do=run)


def add_logs(commands: Commands) -> None:
    parser = commands.add_parser(
        "logs",
        help="the output of an execution",
        description="The output of an execution, as recorded or with -f as it comes.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", help="of the execution")
    parser.add_argument("-f", "--follow", action="store_true", help="until it has ended")
    parser.add_argument("--raw", action="store_true", help="escape nothing on a terminal")
    parser.add_argument("--json", action="store_true", help="print its record instead")
    parser.set_defaults(do=logs)


def add_keys(commands: Commands) -> None:
    parser = commands.add_parser(
        "keys",
        help="the public keys of receipts, for `verify`",
        description="Print the public keys of receipts. Fetch them once, and keep them.",
    )
    parser.set_defaults(do=keys)


def run(client: Cofferdam, options: argparse.Namespace) -> int:
    text, wanted = code.code_of(options), code.options_of(options)
    if language := code.language_of(options):
        wanted["language"] = language
    if options.detach:
        submitted = client.submit(text, **wanted)
        if options.json:
            output.as_json(submitted.raw)
        else:
            output.line(submitted.id)
        return 0
    execution = code.told(client.stream(text, **wanted), options)
    if options.artifacts:
        client.save_artifacts(execution, options.artifacts)
    return exits.exit_code_of(execution)


def logs(client: Cofferdam, options: argparse.Namespace) -> int:
    if not options.follow:
        return code.told_record(client.execution(options.id), options)
    return exits.exit_code_of(code.told(client.follow(options.id), options))


def keys(client: Cofferdam, options: argparse.Namespace) -> int:
    output.as_json(client.ledger_keys())
    return 0
