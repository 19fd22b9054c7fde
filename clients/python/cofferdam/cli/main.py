"""`cofferdam`: the commands, and the error messages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from cofferdam import Cofferdam, __version__, verify_receipt
from cofferdam.cli import exits, output, run, session
from cofferdam.cli.parser import Parser
from cofferdam.errors import CofferdamError, ServiceError

_SETTINGS = f"""\
settings, from the environment:
  COFFERDAM_URL      URL of the service; default: http://127.0.0.1:8000
  COFFERDAM_API_KEY  your API key

{exits.HELP}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["verify"]:
        return int(verify_receipt.main(given[1:], prog="cofferdam verify"))  # type: ignore[no-untyped-call]
    options = _parser().parse_args(given)
    try:
        with Cofferdam() as client:
            return int(options.do(client, options))
    except KeyboardInterrupt:
        return exits.CANCELLED
    except BrokenPipeError:
        # The reader is gone. What Python would still write at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.OURS
    except ServiceError as error:
        if getattr(options, "json", False):
            output.as_json(error.body)
        output.problem(str(error))
        return exits.OURS
    except (CofferdamError, OSError, ValueError) as error:
        output.problem(str(error))
        return exits.OURS


def _parser() -> Parser:
    parser = Parser(
        prog="cofferdam",
        description="Run code in isolated sandboxes.",
        epilog=_SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run.add_run(commands)
    session.add_session(commands)
    session.add_files(commands)
    run.add_logs(commands)
    run.add_keys(commands)
    # The script of examples/receipts reads its arguments.
    commands.add_parser("verify", help="verify a receipt, without the service", add_help=False)
    return parser
