"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn, TypeAlias

from cofferdam.cli import exits


class Parser(argparse.ArgumentParser):
    """Exits with cofferdam's own code: argparse's code 2 may be the program's."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(exits.OURS, f"{self.prog}: {message}\n")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
