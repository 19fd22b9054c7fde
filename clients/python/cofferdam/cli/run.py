"""`cofferdam run` and `cofferdam logs`."""

from __future__ import annotations

import argparse

from cofferdam import Cofferdam
from cofferdam.cli import code, exits, output
from cofferdam.cli.parser import Commands


def add_run(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run code in a new sandbox",
        description="Run code in a new sandbox. The output appears while the code runs.\nCtrl-C "
        "cancels the run.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    code.add_arguments(parser)
    code.add_network(parser)
    parser.add_argument(
        "-l", "--language", help="default: from the file extension, otherwise python"
    )
    parser.add_argument(
        "--detach",
        action="store_true",
        help="print the id of the execution and do not wait; see `logs`",
    )
    parser.set_defaults(do=run)


def add_logs(commands: Commands) -> None:
    parser = commands.add_parser(
        "logs",
        help="print the output of an execution",
        description="Print the recorded output of an execution. With -f, follow it to the end.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", help="id of the execution")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="follow the output until the run has ended"
    )
    parser.add_argument("--raw", action="store_true", help=code.RAW)
    parser.add_argument("--json", action="store_true", help="print the record instead")
    parser.set_defaults(do=logs)


def add_keys(commands: Commands) -> None:
    parser = commands.add_parser(
        "keys",
        help="print the public keys of receipts, for `verify`",
        description="Print the public keys of receipts. Fetch them once, and save them.",
    )
    parser.set_defaults(do=keys)


def run(client: Cofferdam, options: argparse.Namespace) -> int:
    text = code.code_of(options)
    wanted = code.options_of(options) | code.network_of(options)
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
